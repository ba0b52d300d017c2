#include <cmath>

#include "checks.h"
#include "device.h"

namespace hip_kernels::binding {
namespace {

using at::Tensor;

VoxelGrid grid_of(at::ArrayRef<double> voxel_size, at::ArrayRef<double> range) {
    TORCH_CHECK_VALUE(voxel_size.size() == 3, "hip_kernels: expected voxel_size of 3 numbers, got ", voxel_size.size());
    TORCH_CHECK_VALUE(range.size() == 6, "hip_kernels: expected range of 6 numbers (x, y, z lowest, then highest), got ",
                range.size());
    VoxelGrid grid{};
    double cells = 1;
    for (int axis = 0; axis < 3; ++axis) {
        TORCH_CHECK_VALUE(voxel_size[axis] > 0 && std::isfinite(voxel_size[axis]),
                    "hip_kernels: expected a positive voxel_size, got ", voxel_size[axis], " for axis ", axis);
        const double cells_here = std::round((range[axis + 3] - range[axis]) / voxel_size[axis]);
        TORCH_CHECK_VALUE(cells_here >= 1 && std::isfinite(cells_here), "hip_kernels: expected a range of at least one voxel on axis ",
                    axis, ", got ", range[axis], " to ", range[axis + 3]);
        cells *= cells_here;
        TORCH_CHECK_VALUE(cells < 2147483648.0, "hip_kernels: expected a grid of fewer than 2^31 voxels, got ", cells);
        grid.voxel_size[axis] = float(voxel_size[axis]);
        grid.range_min[axis] = float(range[axis]);
        grid.size[axis] = int32_t(cells_here);
    }
    return grid;
}

void check_points(const Tensor& points) {
    check_dim(points, 2, "points", "(N, F)");
    TORCH_CHECK_VALUE(points.size(1) >= 3, "hip_kernels: expected points with x, y, z first, got ", points.size(1), " columns");
    check_dtype(points, at::kFloat, "points");
    TORCH_CHECK_VALUE(points.size(0) < (int64_t(1) << 31), "hip_kernels: expected fewer than 2^31 points, got ", points.size(0));
}

using VoxelizeResult = std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor>;

template <typename Launch>
VoxelizeResult voxelize(const Tensor& points, at::ArrayRef<double> voxel_size, at::ArrayRef<double> range,
                        int64_t max_points, int64_t max_voxels, const Launch& launch) {
    check_points(points);
    TORCH_CHECK_VALUE(max_points > 0 && max_voxels > 0 && max_points * max_voxels < (int64_t(1) << 31),
                "hip_kernels: expected positive max_points and max_voxels with a product below 2^31, got ", max_points,
                " and ", max_voxels);
    const Tensor input = dense(points);
    const auto ints = input.options().dtype(at::kInt);
    const Tensor voxels = at::empty({max_voxels, max_points, points.size(1)}, input.options());
    const Tensor coordinates = at::empty({max_voxels, 3}, ints), per_voxel = at::empty({max_voxels}, ints);
    const Tensor index = at::empty({max_voxels, max_points}, ints), count = at::empty({1}, ints);
    launch(Voxelize{grid_of(voxel_size, range), points.size(0), points.size(1), max_points, max_voxels,
                    input.const_data_ptr<float>(), voxels.mutable_data_ptr<float>(),
                    coordinates.mutable_data_ptr<int32_t>(), per_voxel.mutable_data_ptr<int32_t>(),
                    index.mutable_data_ptr<int32_t>(), count.mutable_data_ptr<int32_t>()});
    return {voxels, coordinates, per_voxel, index, count};
}

template <typename Launch>
Tensor dynamic_voxelize(const Tensor& points, at::ArrayRef<double> voxel_size, at::ArrayRef<double> range,
                        const Launch& launch) {
    check_points(points);
    const Tensor input = dense(points);
    const Tensor coordinates = at::empty({points.size(0), 3}, input.options().dtype(at::kInt));
    launch(DynamicVoxelize{grid_of(voxel_size, range), points.size(0), points.size(1), input.const_data_ptr<float>(),
                           coordinates.mutable_data_ptr<int32_t>()});
    return coordinates;
}

VoxelizeResult voxelize_cpu(const Tensor& points, at::ArrayRef<double> voxel_size, at::ArrayRef<double> range,
                            int64_t max_points, int64_t max_voxels) {
    return voxelize(points, voxel_size, range, max_points, max_voxels, [](const Voxelize& p) { cpu::voxelize(p); });
}

Tensor dynamic_voxelize_cpu(const Tensor& points, at::ArrayRef<double> voxel_size, at::ArrayRef<double> range) {
    return dynamic_voxelize(points, voxel_size, range, [](const DynamicVoxelize& p) { cpu::dynamic_voxelize(p); });
}

#ifdef HIP_KERNELS_WITH_GPU
VoxelizeResult voxelize_gpu(const Tensor& points, at::ArrayRef<double> voxel_size, at::ArrayRef<double> range,
                            int64_t max_points, int64_t max_voxels) {
    const c10::DeviceGuard guard(points.device());
    return voxelize(points, voxel_size, range, max_points, max_voxels, [&](const Voxelize& p) {
        size_t bytes = 0;
        check_launch(gpu::voxelize_workspace_bytes(p, &bytes), "voxelize");
        const Tensor workspace = workspace_for(bytes, points);
        check_launch(gpu::voxelize(p, workspace.mutable_data_ptr(), bytes, current_stream(points)), "voxelize");
    });
}

Tensor dynamic_voxelize_gpu(const Tensor& points, at::ArrayRef<double> voxel_size, at::ArrayRef<double> range) {
    const c10::DeviceGuard guard(points.device());
    return dynamic_voxelize(points, voxel_size, range, [&](const DynamicVoxelize& p) {
        check_launch(gpu::dynamic_voxelize(p, current_stream(points)), "dynamic_voxelize");
    });
}
#endif

}  // namespace

TORCH_LIBRARY_IMPL(hip_kernels, CPU, library) {
    library.impl("voxelize", &voxelize_cpu);
    library.impl("dynamic_voxelize", &dynamic_voxelize_cpu);
}

#ifdef HIP_KERNELS_WITH_GPU
TORCH_LIBRARY_IMPL(hip_kernels, CUDA, library) {
    library.impl("voxelize", &voxelize_gpu);
    library.impl("dynamic_voxelize", &dynamic_voxelize_gpu);
}
#endif

}  // namespace hip_kernels::binding
