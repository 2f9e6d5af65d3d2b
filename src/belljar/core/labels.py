"""The labels that Belljar puts on containers, volumes and images, so that whoever finds one knows whose it is."""

LABEL = "belljar"  # "1" on everything that Belljar makes
OWNER_LABEL = "belljar.owner"  # the process that made a container or a volume
BOOT_LABEL = "belljar.boot"  # the run of the kernel that the process belongs to
RUN_LABEL = "belljar.run"  # the id of the sandbox
CREATED_LABEL = "belljar.created"  # seconds since the epoch
USER_LABEL = "belljar.user"  # the uid of the process
KEPT_LABEL = "belljar.kept"  # "1" on a container, or a volume of one, that its user wanted to keep
LATEST_LABEL = "belljar.latest"  # on what goes on without its server: when it is nobody's, in seconds since the epoch
TAG_LABEL = "belljar.tag"  # what an image was built as: an image made FROM ours inherits it, but not our name
BASES_LABEL = "belljar.bases"  # the images it was built from, each as name@digest, or name@id where no registry has it
