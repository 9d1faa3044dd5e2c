// fp32 masters that are split: the compute copy in bf16, which exists anyway, and the bits that it lacks.
//
//   master = (high - up) << 16 | low      high: the bf16 copy, rounded to nearest; up: 1 if it was rounded up
//
// Splitting changes no bit, whatever rounding, sign or size a number has; only a signalling NaN cannot be split. No XLA
// types.
#ifndef JAXFERRY_CPU_SPLIT_MASTER_H_
#define JAXFERRY_CPU_SPLIT_MASTER_H_

#include <cstdint>

namespace jaxferry {

// What the copy lacks: the lower bits of each element, and one bit for each, of element 0 first.
struct SplitRest {
  uint16_t* low;
  uint8_t* up;

  // From element `start` on, a multiple of 8.
  SplitRest From(int64_t start) const { return {low + start, up + start / 8}; }
};

// The rest of `size` elements: `low`, then `up` in as many elements of 16 bits as it needs.
inline SplitRest RestAt(uint16_t* rest, int64_t size) { return {rest, reinterpret_cast<uint8_t*>(rest + size)}; }

// Writes the rest of masters whose copy exists; returns whether both together are the masters, bit by bit. On the
// threads of host steps, as the other function.
bool SplitMasters(const float* masters, const uint16_t* copy, int64_t size, SplitRest rest);

void JoinMasters(const uint16_t* copy, const uint16_t* low, const uint8_t* up, int64_t size, float* masters);

}  // namespace jaxferry

#endif  // JAXFERRY_CPU_SPLIT_MASTER_H_
