from spack.package import *
from spack_repo.builtin.build_systems.cmake import CMakeBuilder, CMakePackage
from spack_repo.builtin.build_systems.cuda import CudaPackage
from spack_repo.builtin.build_systems.rocm import ROCmPackage


class HipKernels(CMakePackage, CudaPackage, ROCmPackage):
    """PyTorch operations for perception models: HIP kernels that also compile for CUDA, and CPU versions."""

    # The source is a checkout named by `spack develop` (see the environments), since the project has no release yet.
    has_code = True
    root_cmakelists_dir = "hip_kernels"

    license("Apache-2.0")

    version("main", branch="main")

    variant("torch", default=True, description="Build the PyTorch operations and install the Python package")
    variant("openmp", default=True, description="Run the CPU versions on several threads")

    depends_on("cxx", type="build")
    depends_on("cmake@3.21:", type="build")

    with when("+rocm"):
        depends_on("hip")
        depends_on("rocprim", type="build")
        for _target in ROCmPackage.amdgpu_targets:
            depends_on(f"py-torch+rocm amdgpu_target={_target}", when=f"+torch amdgpu_target={_target}")

    with when("+cuda"):
        depends_on("cuda@12.1:")
        for _arch in CudaPackage.cuda_arch_values:
            depends_on(f"py-torch+cuda cuda_arch={_arch}", when=f"+torch cuda_arch={_arch}")

    with when("+torch"):
        extends("python@3.10:")
        depends_on("py-torch@2.4:", type=("build", "link", "run"))
        depends_on("py-numpy@1.26:", type=("build", "run"))

    conflicts("+rocm", when="+cuda", msg="one build serves one kind of GPU")
    conflicts("cuda_arch=none", when="+cuda", msg="name the architecture, for example cuda_arch=90")

    def cmake_args(self):
        spec = self.spec
        backend = "hip" if spec.satisfies("+rocm") else "cuda" if spec.satisfies("+cuda") else "cpu"
        args = [
            self.define("HIP_KERNELS_BACKEND", backend),
            self.define_from_variant("HIP_KERNELS_TORCH", "torch"),
            self.define("CMAKE_DISABLE_FIND_PACKAGE_OpenMP", spec.satisfies("~openmp")),
        ]
        if backend == "hip":
            args.append(CMakeBuilder.define_hip_architectures(self))
            args.append(self.define("CMAKE_HIP_COMPILER_ROCM_ROOT", spec["hip"].prefix))
        if backend == "cuda":
            args.append(CMakeBuilder.define_cuda_architectures(self))
        if spec.satisfies("+torch"):
            args.append(self.define("Python3_EXECUTABLE", python.path))
            args.append(self.define("HIP_KERNELS_TORCH_DESTINATION", join_path(python_platlib, "hip_kernels")))
        return args
