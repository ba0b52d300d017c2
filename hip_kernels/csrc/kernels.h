// The kernels without PyTorch: raw pointers in a parameter struct, a stream, an error code.
//
// Letters in the comments: B batch, A anchors, P points of an anchor, C cameras, S scales, G groups, E embedding width,
// R rows of one batch's feature table (the sum of H*W over cameras and scales), N points, F features of a point.
// All tensors are dense and row-major. Pointers of the `gpu` functions are device pointers unless said otherwise.
#pragma once

#include <cstddef>
#include <cstdint>

namespace hip_kernels {

enum class DType : int32_t { kFloat32 = 0, kFloat16 = 1, kBFloat16 = 2, kFloat64 = 3 };

// hipStream_t or cudaStream_t; null is the default stream.
using Stream = void*;

constexpr int kMaxScales = 16;
constexpr int kMaxMaps = 256;          // cameras times scales
constexpr int kMaxScaleGroups = 512;   // scales times groups
constexpr int kMaxDetections = 1024;
constexpr int kTiles = 4;           // of a mosaic
constexpr int kGeometry = 10;       // numbers of a layer's geometry
constexpr int kColour = 4;          // numbers of a sample's colour

// Feature rows outside [0, R) that a wrong shape table asks for count as zero padding, so no table can read outside.
struct DeformableShape {
    int32_t batch, rows, embed, anchors, points, cameras, scales, groups;
};

struct DeformableForward {
    DeformableShape shape;
    DType dtype;                    // of features, weights, output; locations are float32, or float64 with kFloat64
    const void* features;           // (B, R, E)
    const int32_t* spatial_shapes;  // (C, S, 2): height, width
    const int32_t* scale_start;     // (C, S): first row
    const void* locations;          // (B, A, P, C, 2): x, y relative to the image; outside (0, 1) skipped
    const void* weights;            // (B, A, P, C, S, G)
    void* output;                   // (B, A, E)
};

struct DeformableBackward {
    DeformableForward forward;  // its output is not read
    const void* grad_output;    // (B, A, E), of dtype
    void* grad_features;        // (B, R, E), float32 (float64 with kFloat64), zeroed by the caller
    void* grad_locations;       // like locations, every element written
    void* grad_weights;         // like weights, every element written
};

// Grid of voxels, in the order x, y, z; `cells` is their product and below 2^31.
struct VoxelGrid {
    float voxel_size[3];
    float range_min[3];
    int32_t size[3];
};

struct Voxelize {
    VoxelGrid grid;
    int64_t count;                 // N
    int64_t features;              // F >= 3, float32
    int64_t max_points;
    int64_t max_voxels;
    const float* points;           // (N, F), x, y, z first
    float* voxels;                 // (max_voxels, max_points, F)
    int32_t* coordinates;          // (max_voxels, 3): z, y, x; -1 past the last voxel
    int32_t* points_per_voxel;     // (max_voxels)
    int32_t* point_index;          // (max_voxels, max_points): row of `points`, or -1
    int32_t* voxel_count;          // (1)
};

struct DynamicVoxelize {
    VoxelGrid grid;
    int64_t count, features;
    const float* points;
    int32_t* coordinates;  // (N, 3): z, y, x, or -1 three times outside the range
};

// L layers (1, or 2 with mix-up) of up to four tiles each; see hip_kernels.AugmentTable for what the numbers mean.
struct MosaicAugment {
    int32_t batch, layers, images, image_height, image_width, height, width;
    DType dtype;              // of the output, which is 0 to 1; not kFloat64
    bool channels_last;       // output (B, height, width, 3) instead of (B, 3, height, width)
    float fill;               // 0 to 255, outside every image
    const uint8_t* source;    // (images, image_height, image_width, 3); device memory, or host memory the device can read
    const int32_t* tiles;     // (B, L, 4, 3): image or -1, x and y of its origin on the canvas
    const float* geometry;    // (B, L, 10)
    const float* colour;      // (B, 4)
    void* output;
};

struct BatchedNms {
    int64_t batch, candidates, max_detections;
    float iou_threshold;
    const float* boxes;      // (B, A, 4): x1, y1, x2, y2
    const float* scores;     // (B, A); NaN and -inf are no candidates
    const int64_t* classes;  // (B, A)
    int64_t* kept;           // (B, max_detections): by falling score, -1 past the last
    int64_t* kept_count;     // (B)
};

namespace cpu {
void deformable_aggregation_forward(const DeformableForward& params);
void deformable_aggregation_backward(const DeformableBackward& params);
void voxelize(const Voxelize& params);
void dynamic_voxelize(const DynamicVoxelize& params);
void batched_nms(const BatchedNms& params);
void mosaic_augment(const MosaicAugment& params);
}  // namespace cpu

// Each returns 0, or an error of the runtime that `error_string` explains. Nothing here waits for the device.
namespace gpu {
const char* error_string(int error);
int deformable_aggregation_forward(const DeformableForward& params, Stream stream);
int deformable_aggregation_backward(const DeformableBackward& params, Stream stream);
int voxelize_workspace_bytes(const Voxelize& params, size_t* bytes);
int voxelize(const Voxelize& params, void* workspace, size_t workspace_bytes, Stream stream);
int dynamic_voxelize(const DynamicVoxelize& params, Stream stream);
int mosaic_augment(const MosaicAugment& params, Stream stream);
int batched_nms_workspace_bytes(const BatchedNms& params, size_t* bytes);
int batched_nms(const BatchedNms& params, void* workspace, size_t workspace_bytes, Stream stream);
}  // namespace gpu

}  // namespace hip_kernels
