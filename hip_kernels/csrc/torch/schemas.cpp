// Defines the operations in PyTorch's dispatcher; the schemas themselves stand in schemas.inc.
#include "prelude.h"

TORCH_LIBRARY(hip_kernels, library) {
#define HIP_KERNELS_SCHEMA(schema) library.def(schema);
#include "../schemas.inc"
#undef HIP_KERNELS_SCHEMA
}
