# The PyTorch operations. The paths come from the Python that will load them: PyTorch's own CMake package would look for a
# whole CUDA or ROCm toolkit, of which the bindings need nothing.
find_package(Python3 REQUIRED COMPONENTS Interpreter)
execute_process(
  COMMAND ${Python3_EXECUTABLE} -c "import torch
from torch.utils import cpp_extension
print(';'.join(cpp_extension.include_paths()))
print(';'.join(cpp_extension.library_paths()))
print(int(torch.compiled_with_cxx11_abi()))
print('hip' if torch.version.hip else 'cuda' if torch.version.cuda else 'cpu')"
  OUTPUT_VARIABLE torch_facts OUTPUT_STRIP_TRAILING_WHITESPACE RESULT_VARIABLE torch_failed)
if(torch_failed)
  message(FATAL_ERROR "HIP_KERNELS_TORCH=ON, but ${Python3_EXECUTABLE} cannot import torch")
endif()
string(REPLACE ";" "|" torch_facts "${torch_facts}")
string(REPLACE "\n" ";" torch_facts "${torch_facts}")
list(GET torch_facts 0 torch_includes)
list(GET torch_facts 1 torch_library_dirs)
list(GET torch_facts 2 torch_cxx11_abi)
list(GET torch_facts 3 torch_backend)
string(REPLACE "|" ";" torch_includes "${torch_includes}")
string(REPLACE "|" ";" torch_library_dirs "${torch_library_dirs}")

add_library(hip_kernels_torch MODULE
  csrc/torch/schemas.cpp csrc/torch/deformable_aggregation.cpp csrc/torch/voxelize.cpp csrc/torch/mosaic_augment.cpp
  csrc/torch/batched_nms.cpp)
set_target_properties(hip_kernels_torch PROPERTIES PREFIX "" OUTPUT_NAME _hip_kernels)
target_include_directories(hip_kernels_torch SYSTEM PRIVATE ${torch_includes})
target_compile_definitions(hip_kernels_torch PRIVATE _GLIBCXX_USE_CXX11_ABI=${torch_cxx11_abi})
target_compile_features(hip_kernels_torch PRIVATE cxx_std_20)
target_precompile_headers(hip_kernels_torch PRIVATE csrc/torch/prelude.h)
target_link_directories(hip_kernels_torch PRIVATE ${torch_library_dirs})
# Named before what the compiler adds by itself: with a toolchain that links the C++ library statically, streams and locales
# would otherwise exist twice in the process, and PyTorch's printing of an error would crash.
target_link_libraries(hip_kernels PRIVATE -l:libstdc++.so.6)
target_link_libraries(hip_kernels_torch PRIVATE hip_kernels torch_cpu c10 -l:libstdc++.so.6)
if(NOT HIP_KERNELS_BACKEND STREQUAL "cpu")
  # The current stream comes from the PyTorch of the same platform. On a login node PyTorch may be another build; then the
  # symbol is left for the compute node.
  if(torch_backend STREQUAL HIP_KERNELS_BACKEND)
    if(torch_backend STREQUAL "hip")
      target_link_libraries(hip_kernels_torch PRIVATE torch_hip)
    else()
      target_link_libraries(hip_kernels_torch PRIVATE torch_cuda)
    endif()
  else()
    message(WARNING "building for ${HIP_KERNELS_BACKEND} against a PyTorch for ${torch_backend}")
  endif()
endif()
set_target_properties(hip_kernels hip_kernels_torch PROPERTIES INSTALL_RPATH "$ORIGIN;${CMAKE_INSTALL_FULL_LIBDIR}"
                                                               BUILD_RPATH_USE_ORIGIN ON)
# the Python package beside its library
install(TARGETS hip_kernels_torch DESTINATION ${HIP_KERNELS_TORCH_DESTINATION})
install(FILES __init__.py _library.py build.py ops.py reference.py py.typed DESTINATION ${HIP_KERNELS_TORCH_DESTINATION})
install(FILES csrc/schemas.inc DESTINATION ${HIP_KERNELS_TORCH_DESTINATION}/csrc)
