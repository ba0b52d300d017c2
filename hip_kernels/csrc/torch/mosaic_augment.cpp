#include "checks.h"
#include "device.h"

namespace hip_kernels::binding {
namespace {

using at::Tensor;

template <typename Launch>
Tensor mosaic_augment(const Tensor& images, const Tensor& tiles, const Tensor& geometry, const Tensor& colour, int64_t height,
                      int64_t width, double fill, at::ScalarType dtype, bool channels_last, const Launch& launch) {
    check_dim(images, 4, "images", "(N, H, W, 3)");
    check_size(images, 3, 3, "images", "(N, H, W, 3)");
    check_dtype(images, at::kByte, "images");
    check_dim(tiles, 4, "tiles", "(B, L, 4, 3)");
    check_size(tiles, 2, kTiles, "tiles", "(B, L, 4, 3)");
    check_size(tiles, 3, 3, "tiles", "(B, L, 4, 3)");
    check_dtype(tiles, at::kInt, "tiles");
    check_dim(geometry, 3, "geometry", "(B, L, 10)");
    check_size(geometry, 0, tiles.size(0), "geometry", "(B, L, 10)");
    check_size(geometry, 1, tiles.size(1), "geometry", "(B, L, 10)");
    check_size(geometry, 2, kGeometry, "geometry", "(B, L, 10)");
    check_dtype(geometry, at::kFloat, "geometry");
    check_dim(colour, 2, "colour", "(B, 4)");
    check_size(colour, 0, tiles.size(0), "colour", "(B, 4)");
    check_size(colour, 1, kColour, "colour", "(B, 4)");
    check_dtype(colour, at::kFloat, "colour");
    check_device(geometry, tiles, "geometry");
    check_device(colour, tiles, "colour");
    TORCH_CHECK_VALUE(tiles.size(1) == 1 || tiles.size(1) == 2, "hip_kernels: expected 1 or 2 layers, got ", tiles.size(1));
    constexpr int64_t kMost = int64_t(1) << 31;
    TORCH_CHECK_VALUE(height > 0 && width > 0 && height * width * 3 < kMost && tiles.size(0) < 65536,
                "hip_kernels: expected a positive output size below 2^31 elements an image and fewer than 65536 images, got ",
                height, " x ", width, " and ", tiles.size(0));
    TORCH_CHECK_VALUE(images.size(0) < kMost && images.size(1) * images.size(2) * 3 < kMost,
                "hip_kernels: expected images below 2^31 elements each, got ", images.sizes());
    TORCH_CHECK_TYPE(dtype == at::kFloat || dtype == at::kHalf || dtype == at::kBFloat16,
                "hip_kernels: expected output dtype float32, float16 or bfloat16, got ", dtype);
    const Tensor t = tiles.contiguous(), g = geometry.contiguous(), c = colour.contiguous();
    const auto options = geometry.options().dtype(dtype).memory_format(channels_last ? at::MemoryFormat::ChannelsLast
                                                                                      : at::MemoryFormat::Contiguous);
    const auto small = [](int64_t size) { return int32_t(size); };
    Tensor output = at::empty({tiles.size(0), 3, height, width}, options);
    MosaicAugment p{small(tiles.size(0)), small(tiles.size(1)), small(images.size(0)), small(images.size(1)),
                    small(images.size(2)), small(height), small(width), DType::kFloat32, channels_last, float(fill),
                    images.const_data_ptr<uint8_t>(), t.const_data_ptr<int32_t>(), g.const_data_ptr<float>(),
                    c.const_data_ptr<float>(), nullptr};
    return launch(p, output);
}

// Copying the images would cost more than the operation, so they have to come dense.
void check_dense(const Tensor& images) {
    TORCH_CHECK_VALUE(images.is_contiguous(), "hip_kernels: expected contiguous images (N, H, W, 3), got strides ",
                images.strides());
    TORCH_CHECK_VALUE(reinterpret_cast<uintptr_t>(images.const_data_ptr()) % 4 == 0,
                "hip_kernels: expected images that start on a 4-byte boundary");
}

Tensor mosaic_augment_cpu(const Tensor& images, const Tensor& tiles, const Tensor& geometry, const Tensor& colour,
                          int64_t height, int64_t width, double fill, at::ScalarType dtype, bool channels_last) {
    check_dense(images);
    const auto launch = [](MosaicAugment& p, Tensor& output) {
        const Tensor wide = output.scalar_type() == at::kFloat ? output : at::empty_like(output, at::kFloat);
        p.output = wide.mutable_data_ptr();
        cpu::mosaic_augment(p);
        return wide.to(output.scalar_type());
    };
    return mosaic_augment(images, tiles, geometry, colour, height, width, fill, dtype, channels_last, launch);
}

#ifdef HIP_KERNELS_WITH_GPU
Tensor mosaic_augment_gpu(const Tensor& images, const Tensor& tiles, const Tensor& geometry, const Tensor& colour,
                          int64_t height, int64_t width, double fill, at::ScalarType dtype, bool channels_last) {
    check_dense(images);
    TORCH_CHECK_VALUE(images.device() == tiles.device() || images.is_pinned(), "hip_kernels: expected images on ", tiles.device(),
                " or in pinned host memory, got ", images.device());
    const c10::DeviceGuard guard(tiles.device());
    const auto launch = [&](MosaicAugment& p, Tensor& output) {
        p.dtype = dtype_of(output, "output");
        p.output = output.mutable_data_ptr();
        check_launch(gpu::mosaic_augment(p, current_stream(tiles)), "mosaic_augment");
        return output;
    };
    return mosaic_augment(images, tiles, geometry, colour, height, width, fill, dtype, channels_last, launch);
}
#endif

}  // namespace

TORCH_LIBRARY_IMPL(hip_kernels, CPU, library) { library.impl("mosaic_augment", &mosaic_augment_cpu); }

#ifdef HIP_KERNELS_WITH_GPU
TORCH_LIBRARY_IMPL(hip_kernels, CUDA, library) { library.impl("mosaic_augment", &mosaic_augment_gpu); }
#endif

}  // namespace hip_kernels::binding
