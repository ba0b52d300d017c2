from spack.package import *
from spack_repo.builtin.build_systems.python import PythonPackage


class PyHpcjobs(PythonPackage):
    """Tune and train perception models on Slurm clusters with partitioned GPUs."""

    # The source is a checkout named by `spack develop` (see the environments), since the project has no release yet.
    has_code = True

    license("Apache-2.0")

    version("main", branch="main")

    variant("train", default=True, description="What preparing data and training AutoSpeed need")
    variant("kernels", default=True, description="The compiled operations of hip-kernels", when="+train")
    variant("plots", default=True, description="Figures in reports")

    depends_on("py-setuptools@68:", type="build")

    with default_args(type=("build", "run")):
        depends_on("python@3.10:")
        depends_on("py-submitit@1.5.2:")
        depends_on("py-optuna@4.2:")
        depends_on("py-filelock@3.30:")
        depends_on("py-msgspec@0.18:")
        depends_on("py-numpy@1.26:")
        depends_on("py-pydantic@2.6:")
        depends_on("py-pyyaml@6:")
        depends_on("py-rich@13.7:")
        depends_on("py-matplotlib@3.8:", when="+plots")

    with when("+train"), default_args(type=("build", "run")):
        depends_on("py-torch@2.4:")
        depends_on("opencv@4.9:+python3+imgproc+imgcodecs")
        depends_on("py-tensorboard@2.14:")

    # Both install a folder hip_kernels, so the Python files come from hip-kernels alone; see `install`.
    depends_on("hip-kernels+torch", type=("build", "run"), when="+kernels")

    @run_after("install", when="+kernels")
    def leave_kernels_to_their_own_package(self):
        remove_linked_tree(join_path(python_platlib, "hip_kernels"))
