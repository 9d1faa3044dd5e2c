// x @ w: panels of the weight are copied alternately into the halves of the scratch, each while the previous one is
// multiplied.
//
//   panels_in:  copy 0 | copy 1 | (0 is used)  copy 2 | (1 is used)  copy 3 ...
//   stream:              product 0 (cast first if need be) | product 1 | ...
#include <algorithm>
#include <string>

#include "cuda/kernels.h"
#include "cuda/operations.h"
#include "cuda/panels.h"

namespace jaxferry::cuda {

namespace {

// A copy engine is inefficient on shorter rows of a matrix.
constexpr int64_t kLeastRowBytes = 2048;

struct Slices {
  Panels panels;
  bool is_cast;
};

Slices Cut(const Matmul& call) {
  const bool is_cast = call.x_dtype != call.w_dtype;
  const int64_t slice_bytes = call.k * ItemSize(call.w_dtype);
  const int64_t cast_bytes = is_cast ? call.k * ItemSize(call.x_dtype) : 0;
  const int64_t least = call.transpose ? 1 : kLeastRowBytes / ItemSize(call.w_dtype);
  const Panels panels = CutIntoPanels(call.n, slice_bytes, cast_bytes, least, call.scratch_bytes);
  if (panels.num_slices == 0) {
    throw BadArgument("scratch must hold two " + std::string(call.transpose ? "rows" : "columns") + " of w, at least " +
                      std::to_string(LeastScratchBytes(slice_bytes, cast_bytes)) + " bytes, got " +
                      std::to_string(call.scratch_bytes));
  }
  return {panels, is_cast};
}

// Copies slices [begin, begin + size) of the weight: contiguously if they are rows, else as [k, size].
void CopyPanel(const Matmul& call, int64_t begin, int64_t size, void* panel, cudaStream_t stream) {
  const int64_t item = ItemSize(call.w_dtype);
  const char* w = static_cast<const char*>(call.w);
  if (call.transpose || size == call.n) {
    const char* source = w + begin * (call.transpose ? call.k : 1) * item;
    Check(cudaMemcpyAsync(panel, source, size * call.k * item, cudaMemcpyHostToDevice, stream), "copying a panel of w");
  } else {
    Check(cudaMemcpy2DAsync(panel, size * item, w + begin * item, call.n * item, size * item, call.k,
                            cudaMemcpyHostToDevice, stream),
          "copying a panel of w");
  }
}

// y[:, begin : begin + size] = x @ panel.
void MultiplyPanel(Device& device, const Matmul& call, int64_t begin, int64_t size, const void* panel,
                   cudaStream_t stream) {
  Product product;
  product.a = {call.x, call.k, false};
  product.b = {panel, call.transpose ? call.k : size, call.transpose};
  product.c = static_cast<char*>(call.y) + begin * ItemSize(call.y_dtype);
  product.c_pitch = call.n;
  product.m = call.m;
  product.n = size;
  product.k = call.k;
  product.dtype = call.x_dtype;
  product.c_dtype = call.y_dtype;
  device.multiplier.Multiply(product, stream);
}

void MultiplyByPanels(Device& device, const Matmul& call, cudaStream_t stream) {
  const auto [panels, is_cast] = Cut(call);
  const cudaStream_t copies = device.panels_in.get();
  const EventPool::Lease arrived[2] = {device.events.Lend(), device.events.Lend()};
  const EventPool::Lease used[2] = {device.events.Lend(), device.events.Lend()};
  // Earlier work may still use the scratch, whose memory XLA reuses.
  for (const EventPool::Lease& event : used) event->Record(stream);
  DrainOnFailure drain(copies);
  int half = 0;
  for (int64_t begin = 0; begin < call.n; begin += panels.num_slices, half = 1 - half) {
    const int64_t size = std::min(panels.num_slices, call.n - begin);
    char* panel = static_cast<char*>(call.scratch) + half * panels.half_bytes;
    used[half]->Hold(copies);
    CopyPanel(call, begin, size, panel, copies);
    arrived[half]->Record(copies);
    arrived[half]->Hold(stream);
    if (is_cast) {
      char* cast = panel + panels.cast_offset;
      Convert({call.w_dtype, call.x_dtype, panel, cast, size * call.k, false}, kBlocksOfDevice, stream);
      panel = cast;
    }
    MultiplyPanel(device, call, begin, size, panel, stream);
    used[half]->Record(stream);
  }
  drain.Done();
}

}  // namespace

void RunMatmul(Device& device, const Matmul& call, cudaStream_t stream) {
  if (call.m == 0 || call.n == 0) return;
  const bool is_direct = call.method == Method::kDirect || (call.method == Method::kBySize && IsBestDirectly(call));
  if (is_direct) return DirectMatmul(call, stream);
  MultiplyByPanels(device, call, stream);
}

}  // namespace jaxferry::cuda
