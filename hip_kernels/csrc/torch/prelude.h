// What every binding includes; precompiled, since PyTorch's headers take longer to read than all our sources.
#pragma once

#include <ATen/Functions.h>
#include <ATen/core/Tensor.h>
#include <c10/core/DeviceGuard.h>
#include <torch/library.h>

#include <algorithm>
#include <tuple>

#include "../kernels.h"
