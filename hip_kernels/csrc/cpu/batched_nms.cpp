// Non-maximum suppression on the CPU: per image, in the order of falling scores, against the boxes kept so far.
#include <algorithm>
#include <cmath>
#include <numeric>
#include <vector>

#include "../kernels.h"
#include "parallel.h"

namespace hip_kernels::cpu {
namespace {

bool overlaps(const float* a, const float* b, float threshold) {
    const float width = std::max(0.f, std::min(a[2], b[2]) - std::max(a[0], b[0]));
    const float height = std::max(0.f, std::min(a[3], b[3]) - std::max(a[1], b[1]));
    const float both = width * height;
    const float area_a = (a[2] - a[0]) * (a[3] - a[1]), area_b = (b[2] - b[0]) * (b[3] - b[1]);
    return both / (area_a + area_b - both) > threshold;
}

}  // namespace

void batched_nms(const BatchedNms& p) {
    parallel_for(p.batch, [&](int64_t image) {
        const float* boxes = p.boxes + image * p.candidates * 4;
        const float* scores = p.scores + image * p.candidates;
        const int64_t* classes = p.classes + image * p.candidates;
        int64_t* kept = p.kept + image * p.max_detections;
        std::vector<int64_t> order;
        for (int64_t i = 0; i < p.candidates; ++i) {
            if (scores[i] > -INFINITY) order.push_back(i);  // false for NaN too
        }
        std::stable_sort(order.begin(), order.end(), [&](int64_t a, int64_t b) { return scores[a] > scores[b]; });
        int64_t count = 0;
        for (int64_t candidate : order) {
            if (count == p.max_detections) break;
            const bool suppressed = std::any_of(kept, kept + count, [&](int64_t other) {
                return classes[other] == classes[candidate] &&
                       overlaps(boxes + 4 * other, boxes + 4 * candidate, p.iou_threshold);
            });
            if (!suppressed) kept[count++] = candidate;
        }
        std::fill(kept + count, kept + p.max_detections, int64_t(-1));
        p.kept_count[image] = count;
    });
}

}  // namespace hip_kernels::cpu
