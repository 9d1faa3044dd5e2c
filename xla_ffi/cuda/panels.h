// Cuts a product into panels that pass through the two halves of the scratch alternately. No CUDA types.
#ifndef JAXFERRY_CUDA_PANELS_H_
#define JAXFERRY_CUDA_PANELS_H_

#include <algorithm>
#include <cstdint>

namespace jaxferry::cuda {

// Each half of the scratch starts with the panel as it crosses the link; if the weight's dtype differs from that of x,
// the panel cast to the dtype of x follows at `cast_offset`. A slice is a row or column of the weight, or a row of the
// gradient. A panel has `num_slices` slices; the last one may have fewer.
struct Panels {
  int64_t num_slices = 0;
  int64_t half_bytes = 0;
  int64_t cast_offset = 0;
};

// cuBLASLt prefers pointers and leading dimensions that are multiples of this.
inline constexpr int64_t kPanelAlignment = 256;
inline constexpr int64_t kSliceMultiple = 128;
// A panel should take longer on the link than a few launches.
inline constexpr int64_t kLeastPanelBytes = int64_t{2} << 20;
// One panel's copy or product is not overlapped; with this many panels, that is a small share.
inline constexpr int64_t kManyPanels = 16;

inline int64_t RoundUp(int64_t value, int64_t multiple) { return (value + multiple - 1) / multiple * multiple; }
inline int64_t RoundDown(int64_t value, int64_t multiple) { return value / multiple * multiple; }

// Cuts `total_slices` slices of `slice_bytes` (and `cast_slice_bytes` if they are cast, else 0) into panels, of at
// least `least_slices` if they fit. `num_slices` is 0 if the scratch cannot hold two slices.
inline Panels CutIntoPanels(int64_t total_slices, int64_t slice_bytes, int64_t cast_slice_bytes, int64_t least_slices,
                            int64_t scratch_bytes) {
  Panels panels;
  panels.half_bytes = RoundDown(scratch_bytes / 2, kPanelAlignment);
  const int64_t bytes = std::max<int64_t>(slice_bytes + cast_slice_bytes, 1);
  // The cast panel starts at a multiple of the alignment.
  const int64_t padding = cast_slice_bytes == 0 ? 0 : kPanelAlignment - 1;
  const int64_t fitting = std::max<int64_t>(panels.half_bytes - padding, 0) / bytes;
  int64_t wanted = std::max((total_slices + kManyPanels - 1) / kManyPanels, kLeastPanelBytes / bytes);
  wanted = RoundUp(std::max(wanted, least_slices), kSliceMultiple);
  int64_t slices = std::min({fitting, wanted, total_slices});
  // Uneven panels would misalign the columns of the next ones.
  if (slices < total_slices) {
    if (slices >= kSliceMultiple) {
      slices = RoundDown(slices, kSliceMultiple);
    } else if (slices >= 8) {
      slices = RoundDown(slices, 8);
    }
  }
  panels.num_slices = slices;
  panels.cast_offset = RoundUp(slices * slice_bytes, kPanelAlignment);
  return panels;
}

// Returns the minimum scratch for CutIntoPanels.
inline int64_t LeastScratchBytes(int64_t slice_bytes, int64_t cast_slice_bytes) {
  const int64_t padding = cast_slice_bytes == 0 ? 0 : kPanelAlignment - 1;
  return 2 * RoundUp(slice_bytes + cast_slice_bytes + padding, kPanelAlignment);
}

}  // namespace jaxferry::cuda

#endif  // JAXFERRY_CUDA_PANELS_H_
