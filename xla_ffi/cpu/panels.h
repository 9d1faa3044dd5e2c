// How products are cut into panels that fit into the scratch. No XLA types.
#ifndef JAXFERRY_CPU_PANELS_H_
#define JAXFERRY_CPU_PANELS_H_

#include <algorithm>
#include <cstdint>
#include <vector>

namespace jaxferry {

// Room for fp32 panels of `item_size` numbers an item: half of the scratch, for the contract has two in turn, or
// memory of its own where that holds no item.
class Panel {
 public:
  Panel(void* scratch, int64_t scratch_bytes, int64_t item_size, int64_t num_items) {
    const int64_t fitting = scratch_bytes / 2 / static_cast<int64_t>(sizeof(float)) / std::max<int64_t>(item_size, 1);
    num_items_ = std::max<int64_t>(1, std::min(fitting, num_items));
    // BLAS computes the last few columns of a product by other code: whole blocks keep results the same for any size.
    if (num_items_ < num_items && num_items_ > kBlock) num_items_ -= num_items_ % kBlock;
    if (fitting == 0) own_.resize(item_size);
    data_ = fitting == 0 ? own_.data() : static_cast<float*>(scratch);
  }

  float* data() const { return data_; }
  int64_t num_items() const { return num_items_; }

 private:
  static constexpr int64_t kBlock = 64;

  std::vector<float> own_;
  float* data_;
  int64_t num_items_;
};

}  // namespace jaxferry

#endif  // JAXFERRY_CPU_PANELS_H_
