// How products are cut into panels that fit into the scratch. No XLA types.
#ifndef JAXFERRY_CPU_PANELS_H_
#define JAXFERRY_CPU_PANELS_H_

#include <algorithm>
#include <cstdint>
#include <vector>

namespace jaxferry {

// Room for an fp32 panel of `kNumItems` items, `item_size` numbers each: in half of the scratch, for the contract has two
// panels in turn; in memory of its own where that is too small. BLAS may round a column otherwise with the number of
// columns in its call (OpenBLAS does, by what is left over from the blocks of its kernels and by how it shares columns
// out among threads): panels are of one size whatever the scratch, so results are too.
class Panel {
 public:
  Panel(void* scratch, int64_t scratch_bytes, int64_t item_size, int64_t num_items) {
    num_items_ = std::min(num_items, kNumItems);
    const int64_t size = item_size * num_items_;
    const bool fits = size <= scratch_bytes / 2 / static_cast<int64_t>(sizeof(float));
    if (!fits) own_.resize(size);
    data_ = fits ? static_cast<float*>(scratch) : own_.data();
  }

  float* data() const { return data_; }
  int64_t num_items() const { return num_items_; }

 private:
  // With as many, products take some 5 % longer than with all columns at once; with 64 twice as long for few rows.
  static constexpr int64_t kNumItems = 1024;

  std::vector<float> own_;
  float* data_;
  int64_t num_items_;
};

}  // namespace jaxferry

#endif  // JAXFERRY_CPU_PANELS_H_
