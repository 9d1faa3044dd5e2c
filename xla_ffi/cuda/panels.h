// Cuts a product into panels that pass through the two halves of the scratch alternately. No CUDA types.
#ifndef JAXFERRY_CUDA_PANELS_H_
#define JAXFERRY_CUDA_PANELS_H_

#include <algorithm>
#include <cstdint>

namespace jaxferry::cuda {

// Each half of the scratch starts with the panel as it crosses the link; if the panel is also needed in another form
// (cast, or without padding), that form is at `second_offset`. A slice is a row or column of the weight, or a row of
// the gradient. A panel has `num_slices` slices, the last one may have fewer, and there is memory for `padded_slices`.
struct Panels {
  int64_t num_slices = 0;
  int64_t padded_slices = 0;
  int64_t half_bytes = 0;
  int64_t second_offset = 0;
};

// cuBLASLt prefers pointers that are multiples of this.
inline constexpr int64_t kPanelAlignment = 256;
// Its fast algorithms need rows that start at multiples of this.
inline constexpr int64_t kPitchAlignment = 16;
// The sizes of the tiles of its fast algorithms: an incomplete tile costs as much as a complete one.
inline constexpr int64_t kSmallTile = 128;
inline constexpr int64_t kLargeTile = 256;
// Rows of so many numbers are aligned for every dtype.
inline constexpr int64_t kAlignedNumbers = 8;
// A panel should take longer on the link than a few launches.
inline constexpr int64_t kLeastPanelBytes = int64_t{2} << 20;
// One panel's copy or product is not overlapped; with this many panels, that is a small share.
inline constexpr int64_t kManyPanels = 16;

inline int64_t RoundUp(int64_t value, int64_t multiple) { return (value + multiple - 1) / multiple * multiple; }
inline int64_t RoundDown(int64_t value, int64_t multiple) { return value / multiple * multiple; }

// Whether a copy engine reads rows of a host matrix as fast as contiguous bytes. On an H200
// (benchmarks/results/gpu/h200/link_and_memory.json), it reaches 55 GB/s from rows of an eighth of the pitch on (1 KiB
// of 8 KiB, 4 KiB of 32 KiB), and half of that with narrower ones; a kernel has 49 to 51 from 128 bytes on.
inline bool IsForCopyEngine(int64_t row_bytes, int64_t pitch_bytes) {
  constexpr int64_t kLeastRowBytes = 1024;
  constexpr int64_t kMostRowsOfPitch = 8;
  return row_bytes >= kLeastRowBytes && pitch_bytes / kMostRowsOfPitch <= row_bytes;
}

// Returns `slices`, a multiple of the large tile, or up to twice as many if multiprocessors would idle. The product of
// a panel, slices of `width` numbers, is computed in waves of one tile for each multiprocessor, and an incomplete wave
// takes as long as a complete one.
inline int64_t FillWaves(int64_t slices, int64_t width, int64_t num_multiprocessors) {
  const int64_t along = slices / kLargeTile;
  const int64_t across = (width + kSmallTile - 1) / kSmallTile;
  const int64_t waves = (along * across + num_multiprocessors - 1) / num_multiprocessors;
  return kLargeTile * std::min(2 * along, waves * num_multiprocessors / across);
}

// Cuts `total_slices` slices of `slice_bytes` (and `second_slice_bytes` in a second form, or 0) into panels.
// `num_slices` is 0 if the scratch cannot hold two slices. If a `width` is given, the panels fill waves.
inline Panels CutIntoPanels(int64_t total_slices, int64_t slice_bytes, int64_t second_slice_bytes,
                            int64_t scratch_bytes, int64_t width = 0, int64_t num_multiprocessors = 0) {
  Panels panels;
  panels.half_bytes = RoundDown(scratch_bytes / 2, kPanelAlignment);
  const int64_t bytes = std::max<int64_t>(slice_bytes + second_slice_bytes, 1);
  // The second form starts at a multiple of the alignment.
  const int64_t gap = second_slice_bytes == 0 ? 0 : kPanelAlignment - 1;
  const int64_t fitting = std::max<int64_t>(panels.half_bytes - gap, 0) / bytes;
  int64_t wanted = std::max((total_slices + kManyPanels - 1) / kManyPanels, kLeastPanelBytes / bytes);
  wanted = RoundUp(std::max<int64_t>(wanted, 1), kLargeTile);
  if (width > 0) wanted = FillWaves(wanted, width, num_multiprocessors);
  int64_t slices = std::min({fitting, wanted, total_slices});
  // Uneven panels would misalign the columns of the next ones.
  if (slices < total_slices) {
    for (const int64_t multiple : {kLargeTile, kSmallTile, kAlignedNumbers}) {
      if (slices < multiple) continue;
      slices = RoundDown(slices, multiple);
      break;
    }
  }
  panels.num_slices = slices;
  panels.padded_slices = std::min(fitting, RoundUp(slices, kAlignedNumbers));
  panels.second_offset = RoundUp(panels.padded_slices * slice_bytes, kPanelAlignment);
  return panels;
}

// Returns the minimum scratch for CutIntoPanels.
inline int64_t LeastScratchBytes(int64_t slice_bytes, int64_t second_slice_bytes) {
  const int64_t gap = second_slice_bytes == 0 ? 0 : kPanelAlignment - 1;
  return 2 * RoundUp(slice_bytes + second_slice_bytes + gap, kPanelAlignment);
}

}  // namespace jaxferry::cuda

#endif  // JAXFERRY_CUDA_PANELS_H_
