# Starts the command of a test run with our reporters in its way: sh launch.sh FOLDER COMMAND...
# FOLDER has `py` and `js`, and `bin`; `out` is where reports go.
here=$1
shift
BELLJAR_REPORTS=$here/out
BELLJAR_PYTEST_OUT=$here/out
BELLJAR_UNITTEST_OUT=$here/out
PYTHONPATH=$here/py${PYTHONPATH:+:$PYTHONPATH}
PYTEST_PLUGINS=belljar_pytest${PYTEST_PLUGINS:+,$PYTEST_PLUGINS}
export BELLJAR_REPORTS BELLJAR_PYTEST_OUT BELLJAR_UNITTEST_OUT PYTHONPATH PYTEST_PLUGINS
BELLJAR_JS_OUT=$here/out
BELLJAR_GO_OUT=$here/out
BELLJAR_CARGO_OUT=$here/out
export BELLJAR_JS_OUT BELLJAR_GO_OUT BELLJAR_CARGO_OUT
if command -v node >/dev/null 2>&1; then
    NODE_OPTIONS="--require=$here/js/hook.cjs${NODE_OPTIONS:+ $NODE_OPTIONS}"
    export NODE_OPTIONS
fi
for tool in go cargo; do # those that are there, and no others
    command -v "$tool" >/dev/null 2>&1 || rm -f "$here/bin/$tool"
done
if [ -d "$here/bin" ]; then
    PATH=$here/bin:$PATH
    export PATH
fi
exec "$@"
