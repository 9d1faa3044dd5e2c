// How products are cut into panels that fit into the scratch. No XLA types.
#ifndef JAXFERRY_CPU_PANELS_H_
#define JAXFERRY_CPU_PANELS_H_

#include <algorithm>
#include <cstdint>
#include <vector>

namespace jaxferry {

// Room for fp32 panels of whole blocks of items, `item_size` numbers each: in half of the scratch, for the contract has
// two panels in turn; in memory of its own where that holds no block.
class Panel {
 public:
  Panel(void* scratch, int64_t scratch_bytes, int64_t item_size, int64_t num_items) {
    const int64_t item_bytes = std::max<int64_t>(item_size, 1) * static_cast<int64_t>(sizeof(float));
    const int64_t fitting = scratch_bytes / 2 / item_bytes;
    num_items_ = std::min(num_items, std::max(kBlock, fitting - fitting % kBlock));
    if (num_items_ > fitting) own_.resize(item_size * num_items_);
    data_ = num_items_ > fitting ? own_.data() : static_cast<float*>(scratch);
  }

  float* data() const { return data_; }
  int64_t num_items() const { return num_items_; }

 private:
  // BLAS computes the columns left over from its own blocks by other code, which may round otherwise: with panels that
  // end where those do, results are the same for any size of the scratch.
  static constexpr int64_t kBlock = 64;

  std::vector<float> own_;
  float* data_;
  int64_t num_items_;
};

}  // namespace jaxferry

#endif  // JAXFERRY_CPU_PANELS_H_
