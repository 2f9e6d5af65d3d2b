"""Names of packages: what is one, what an administrator allows, and what a runtime has of them."""

from __future__ import annotations

import pytest

from belljar.core import errors, policy, routing
from belljar.core.capabilities import Capabilities, Guarantees, Isolation
from belljar.core.options import request
from belljar.core.package_names import both, lacking, package, project, refused
from belljar.core.plan import Plan
from belljar.core.settings import PackageSettings, Settings
from belljar.protocol.requests import Execute


@pytest.mark.parametrize(
    ("given", "plain", "of"),
    [
        ("requests", "requests", "requests"),
        ("numpy == 2.*", "numpy==2.*", "numpy"),
        ("Foo_Bar.baz[a,b-c]>=1, <2", "Foo_Bar.baz[a,b-c]>=1,<2", "foo-bar-baz"),
        ("x~=1.2.post1", "x~=1.2.post1", "x"),
        ("npm:lodash@4", "npm:lodash@4", "npm:lodash"),
        ("npm:@scope/name@^1.2.3", "npm:@scope/name@^1.2.3", "npm:@scope/name"),
        ("npm:x@latest", "npm:x@latest", "npm:x"),
    ],
)
def test_a_name_with_its_versions_is_taken(given: str, plain: str, of: str) -> None:
    assert (package(given), project(plain)) == (plain, of)


@pytest.mark.parametrize(
    "given",
    ["", ".", "../x",
     "/etc", "-r x", "--index-url=x", "x -r y", "x\n-r y", "x @ https://example.org/x.whl",
     "git+ssh://x",
     "x; python_version<'3'", "${HOME}", "$HOME",
     "x.whl", "x.tar.gz", "x==1.zip", "x[../y]", "x#egg=y", "x==1 --hash=a",
     "npm:../x", "npm:a/b", "npm:x@file:..", "npm:x@npm:y", "npm:x@1.0.0-a.tgz", "npm:x@git+https://e.org/x", "npm:",
     "npm:x@user/repo", "npm:x@ 1", "npm:.bin", "é", "x" * 300, "x==1\0"],
)  # fmt: skip
def test_whatever_says_from_where_or_how_is_no_name(given: str) -> None:
    with pytest.raises(errors.InvalidRequest, match=r"packages: .*is no name of a package: write"):
        request("1", packages=[given])


def test_a_request_takes_names_in_any_order_or_one_folder() -> None:
    assert request("1", packages=["b", "a", "b "]).packages == ("a", "b") == Execute(packages=["b", "a"]).packages
    assert request("1", packages="/venv").packages == "/venv" == Execute(packages="/venv").packages
    for wrong in ([], 3, {"a": 1}, ["a"] * 65):
        with pytest.raises(errors.InvalidRequest, match="packages: "):
            request("1", packages=wrong)  # type: ignore[arg-type]


def test_an_administrator_allows_packages_by_name_and_all_of_a_kind_by_a_star() -> None:
    assert refused(["numpy>=2", "Foo.Bar", "npm:x@1"], ["numpy", "foo-bar", "npm:x"]) == []
    assert refused(["numpy", "npm:x"], ["*"]) == ["npm:x"]
    assert refused(["numpy", "npm:x"], ["npm:*"]) == ["numpy"]
    assert refused(["numpy"], []) == ["numpy"]
    assert set(both(["*", "npm:x"], ["numpy", "npm:*"])) == {"numpy", "npm:x"}
    assert both(["*"], ["npm:*"]) == ()
    with pytest.raises(ValueError, match="without versions"):
        PackageSettings(names=("numpy==2",))


def test_what_may_not_be_installed_is_refused_with_the_setting_that_would_allow_it() -> None:
    settings = Settings(packages=PackageSettings(names=("numpy",)))
    policy.check_packages(Plan(packages=("numpy==2.*",)), settings)
    policy.check_packages(Plan(packages="/venv"), settings)
    with pytest.raises(errors.PolicyDenied, match=r"requests may not be installed here .*packages\.names"):
        policy.check_packages(Plan(packages=("numpy", "requests")), settings)


def test_what_a_runtime_has_meets_a_name_only_in_a_version_that_will_do() -> None:
    there = {"numpy": "2.5.2", "pillow": "13.0.0", "python-dateutil": "2.9.0.post0"}
    met = [
        "numpy",
        "numpy==2.*",
        "numpy>=2,<3",
        "numpy~=2.4",
        "numpy!=2.5.1",
        "numpy==2.5.2",
        "Pillow<=13",
        "python_dateutil",
    ]
    assert lacking(met, there) == []
    missing = ["numpy==3.*", "numpy>2.5.2", "numpy!=2.*", "numpy~=2.6", "pandas", "npm:numpy", "python-dateutil>=2"]
    assert lacking(missing, there) == missing


GUARANTEES = Guarantees(isolation=Isolation.KERNEL, walls=(), limits={}, network="none")


def able(name: str, **more: object) -> Capabilities:
    return Capabilities.model_validate({"backend": name, "available": True, "guarantees": GUARANTEES} | more)


def test_names_go_to_the_runtime_that_has_them_else_to_one_that_installs() -> None:
    wasm = able("wasm", distributions={"numpy": "2.5.2"}, languages={"python"})
    docker, native = able("docker", images=True), able("native", packages=True)

    def chosen(*names: str, backend: str = "auto") -> str:
        return routing.choose(Plan(language="python", packages=names, backend=backend), [wasm, docker, native]).backend

    assert chosen("numpy==2.*") == "wasm"
    assert chosen("numpy", "requests") == "native"
    with pytest.raises(errors.PolicyDenied, match=r"wasm: it has no requests, and nothing can be .*backend=native"):
        chosen("requests", "numpy", backend="wasm")
    with pytest.raises(errors.PolicyDenied, match=r"docker: nothing can be installed in it .*an image that has them"):
        chosen("numpy", backend="docker")
