// x.T @ dy: panels of the product are computed alternately in the halves of the scratch, each while the previous one is
// written to the destination.
//
//   stream:      product 0 | product 1 | (0 is written)  product 2 | ...              | (all is written)
//   panels_out:              write 0   | write 1 | ...
#include <algorithm>
#include <string>

#include "cuda/kernels.h"
#include "cuda/operations.h"
#include "cuda/panels.h"

namespace jaxferry::cuda {

namespace {

// left.T @ right of shape [rows, columns], for left[m, rows] and right[m, columns].
struct Outer {
  const void* left;
  const void* right;
  int64_t rows, columns;
};

Outer OuterOf(const MatmulGradient& call) {
  return call.transpose ? Outer{call.dy, call.x, call.n, call.k} : Outer{call.x, call.dy, call.k, call.n};
}

constexpr Dtype kPanelDtype = Dtype::kFloat32;

Panels Cut(const MatmulGradient& call, const Outer& outer) {
  const int64_t row_bytes = outer.columns * ItemSize(kPanelDtype);
  const Panels panels = CutIntoPanels(outer.rows, row_bytes, 0, 1, call.scratch_bytes);
  if (panels.num_slices > 0) return panels;
  throw BadArgument("scratch must hold two rows of the gradient in float32, at least " +
                    std::to_string(LeastScratchBytes(row_bytes, 0)) + " bytes, got " +
                    std::to_string(call.scratch_bytes));
}

void MultiplyPanel(Device& device, const MatmulGradient& call, const Outer& outer, int64_t begin, int64_t size,
                   void* panel, cudaStream_t stream) {
  Product product;
  product.a = {static_cast<const char*>(outer.left) + begin * ItemSize(call.dtype), outer.rows, true};
  product.b = {outer.right, outer.columns, false};
  product.c = panel;
  product.c_pitch = outer.columns;
  product.m = size;
  product.n = outer.columns;
  product.k = call.m;
  product.dtype = call.dtype;
  product.c_dtype = kPanelDtype;
  device.multiplier.Multiply(product, stream);
}

void WritePanel(const MatmulGradient& call, int64_t start, int64_t size, const void* panel, cudaStream_t stream) {
  char* place = static_cast<char*>(call.destination) + start * ItemSize(call.destination_dtype);
  const Dtype round_to = call.round_to.value_or(Dtype::kFloat32);
  const Conversion conversion = {kPanelDtype, call.destination_dtype, panel, place, size, call.accumulate, round_to};
  if (!IsCopy(conversion)) return Convert(conversion, kBlocksOfLink, stream);
  Check(cudaMemcpyAsync(place, panel, size * ItemSize(kPanelDtype), cudaMemcpyDeviceToHost, stream),
        "copying a panel of the gradient to the destination");
}

}  // namespace

void RunMatmulGradient(Device& device, const MatmulGradient& call, cudaStream_t stream) {
  const Outer outer = OuterOf(call);
  if (outer.rows == 0 || outer.columns == 0) return;
  const Panels panels = Cut(call, outer);
  const cudaStream_t writes = device.panels_out.get();
  const EventPool::Lease made = device.events.Lend();
  const EventPool::Lease written[2] = {device.events.Lend(), device.events.Lend()};
  DrainOnFailure drain(writes);
  int64_t num_panels = 0;
  for (int64_t begin = 0; begin < outer.rows; begin += panels.num_slices, ++num_panels) {
    const int64_t size = std::min(panels.num_slices, outer.rows - begin);
    const int64_t half = num_panels % 2;
    void* panel = static_cast<char*>(call.scratch) + half * panels.half_bytes;
    if (num_panels >= 2) written[half]->Hold(stream);
    MultiplyPanel(device, call, outer, begin, size, panel, stream);
    made->Record(stream);
    made->Hold(writes);
    WritePanel(call, begin * outer.columns, size * outer.columns, panel, writes);
    written[half]->Record(writes);
  }
  // Writes run in order, so the last one ends last.
  written[(num_panels - 1) % 2]->Hold(stream);
  drain.Done();
}

}  // namespace jaxferry::cuda
