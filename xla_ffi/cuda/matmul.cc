// x @ w, x @ w.T and x.T @ dy by panels that pass through the halves of the scratch alternately.
//
// Products: panels of the weight are copied, each while the previous one is multiplied.
//
//   panels_in:  copy 0 | copy 1 | (0 is used)  copy 2 | (1 is used)  copy 3 ...
//   stream:              product 0 (cast first if need be) | product 1 | ...
//
// Gradients: panels of the product are written to the destination, each while the next one is computed.
//
//   stream:      product 0 | product 1 | (0 is written)  product 2 | ...              | (all is written)
//   panels_out:              write 0   | write 1 | ...
//
// Rows of x, y and dy may be padded, so that each starts at a multiple of sixteen bytes. The numbers in the padding of x
// and dy are zeros. Panels are then padded as well, and the sums are over the padding too.
#include <algorithm>
#include <string>

#include "cuda/kernels.h"
#include "cuda/operations.h"
#include "cuda/panels.h"

namespace jaxferry::cuda {

namespace {

int64_t Padded(int64_t size, int64_t limit) { return std::min(RoundUp(size, kAlignedNumbers), limit); }

[[noreturn]] void RefuseScratch(const std::string& two, int64_t least_bytes, int64_t got_bytes) {
  throw BadArgument("scratch must hold two " + two + ", at least " + std::to_string(least_bytes) + " bytes, got " +
                    std::to_string(got_bytes));
}

// Calls `body(begin, size, half, data)` for each panel of slices [begin, begin + size).
template <typename Body>
void ForEachPanel(const Panels& panels, int64_t total_slices, void* scratch, Body&& body) {
  int half = 0;
  for (int64_t begin = 0; begin < total_slices; begin += panels.num_slices, half = 1 - half) {
    const int64_t size = std::min(panels.num_slices, total_slices - begin);
    body(begin, size, half, static_cast<char*>(scratch) + half * panels.half_bytes);
  }
}

// Panels of the weight: rows [begin, begin + size) of w[n, k] if transposed, else columns of w[k, n].
struct Weight {
  explicit Weight(const Matmul& call)
      : call(call), item(ItemSize(call.w_dtype)), depth(Padded(call.k, call.x_pitch)), panels(Cut()) {}

  bool is_cast() const { return call.x_dtype != call.w_dtype; }
  // Elements between the starts of a panel's rows.
  int64_t Pitch(int64_t size) const { return call.transpose ? depth : Padded(size, panels.padded_slices); }
  int64_t NumRows(int64_t size) const { return call.transpose ? size : depth; }

  const Matmul& call;
  const int64_t item;
  // The length of the sums.
  const int64_t depth;
  const Panels panels;

 private:
  Panels Cut() const {
    const int64_t slice_bytes = depth * item;
    const int64_t cast_bytes = is_cast() ? depth * ItemSize(call.x_dtype) : 0;
    const Panels cut = CutIntoPanels(call.n, slice_bytes, cast_bytes, call.scratch_bytes);
    if (cut.num_slices == 0) {
      RefuseScratch(call.transpose ? "rows of w" : "columns of w", LeastScratchBytes(slice_bytes, cast_bytes),
                    call.scratch_bytes);
    }
    return cut;
  }
};

void CopyPanel(const Weight& weight, int64_t begin, int64_t size, char* panel, cudaStream_t stream) {
  const Matmul& call = weight.call;
  const int64_t item = weight.item;
  const int64_t num_rows = call.transpose ? size : call.k;
  const int64_t row_bytes = (call.transpose ? call.k : size) * item;
  const int64_t source_pitch = (call.transpose ? call.k : call.n) * item;
  const int64_t pitch = weight.Pitch(size) * item;
  const char* source = static_cast<const char*>(call.w) + begin * (call.transpose ? call.k : 1) * item;
  const char* what = "copying a panel of w";
  if (row_bytes == source_pitch && row_bytes == pitch) {
    Check(cudaMemcpyAsync(panel, source, num_rows * row_bytes, cudaMemcpyHostToDevice, stream), what);
  } else if (IsForCopyEngine(row_bytes, source_pitch)) {
    Check(cudaMemcpy2DAsync(panel, pitch, source, source_pitch, row_bytes, num_rows, cudaMemcpyHostToDevice, stream),
          what);
  } else {
    ReadRows({source, panel, num_rows, row_bytes, source_pitch, pitch}, stream);
  }
  if (weight.depth == call.k) return;
  // Zeros, because the padding of x times NaN would be NaN.
  const int64_t missing = weight.depth - call.k;
  const cudaError_t cleared = call.transpose
                                  ? cudaMemset2DAsync(panel + row_bytes, pitch, 0, missing * item, size, stream)
                                  : cudaMemsetAsync(panel + call.k * pitch, 0, missing * pitch, stream);
  Check(cleared, "clearing the padding of a panel of w");
}

// y[:, begin : begin + size] = x @ panel.
Product ProductOf(const Weight& weight, int64_t begin, int64_t size, const void* panel) {
  const Matmul& call = weight.call;
  const bool is_last = begin + size == call.n;
  Product product;
  product.a = {call.x, call.x_pitch, false};
  product.b = {panel, weight.Pitch(size), call.transpose};
  product.c = static_cast<char*>(call.y) + begin * ItemSize(call.y_dtype);
  product.c_pitch = call.y_pitch;
  product.m = call.m;
  product.n = is_last ? Padded(size, std::min(weight.panels.padded_slices, call.y_pitch - begin)) : size;
  product.k = weight.depth;
  product.dtype = call.x_dtype;
  product.c_dtype = call.y_dtype;
  return product;
}

// left.T @ right of shape [rows, columns], for left[m, rows] and right[m, columns].
struct Outer {
  const void* left;
  const void* right;
  int64_t rows, columns, left_pitch, right_pitch;
};

Outer OuterOf(const MatmulGradient& call) {
  if (call.transpose) return {call.dy, call.x, call.n, call.k, call.dy_pitch, call.x_pitch};
  return {call.x, call.dy, call.k, call.n, call.x_pitch, call.dy_pitch};
}

// Panels of a gradient: rows [begin, begin + size) of it.
struct Gradient {
  Gradient(const MatmulGradient& call, int64_t num_multiprocessors)
      : call(call),
        outer(OuterOf(call)),
        dtype(PanelDtype()),
        pitch(Padded(outer.columns, outer.right_pitch)),
        panels(Cut(num_multiprocessors)) {}

  bool is_padded() const { return pitch != outer.columns; }

  const MatmulGradient& call;
  const Outer outer;
  const Dtype dtype;
  // Elements between the starts of a panel's rows.
  const int64_t pitch;
  const Panels panels;

 private:
  // Sums that are rounded to the dtype of the factors anyway need no more bits: nothing is added to them before.
  Dtype PanelDtype() const {
    const bool is_stored_so = !call.accumulate && call.destination_dtype == call.dtype && !call.round_to;
    return call.round_to == call.dtype || is_stored_so ? call.dtype : Dtype::kFloat32;
  }

  Panels Cut(int64_t num_multiprocessors) const {
    const int64_t row_bytes = pitch * ItemSize(dtype);
    const int64_t compact_bytes = is_padded() ? outer.columns * ItemSize(dtype) : 0;
    const Panels cut =
        CutIntoPanels(outer.rows, row_bytes, compact_bytes, call.scratch_bytes, pitch, num_multiprocessors);
    if (cut.num_slices == 0) {
      RefuseScratch("rows of the gradient", LeastScratchBytes(row_bytes, compact_bytes), call.scratch_bytes);
    }
    return cut;
  }
};

Product ProductOf(const Gradient& gradient, int64_t begin, int64_t size, void* panel) {
  const Outer& outer = gradient.outer;
  const bool is_last = begin + size == outer.rows;
  Product product;
  product.a = {static_cast<const char*>(outer.left) + begin * ItemSize(gradient.call.dtype), outer.left_pitch, true};
  product.b = {outer.right, outer.right_pitch, false};
  product.c = panel;
  product.c_pitch = gradient.pitch;
  product.m = is_last ? Padded(size, std::min(gradient.panels.padded_slices, outer.left_pitch - begin)) : size;
  product.n = gradient.pitch;
  product.k = gradient.call.m;
  product.dtype = gradient.call.dtype;
  product.c_dtype = gradient.dtype;
  return product;
}

void WritePanel(const Gradient& gradient, int64_t begin, int64_t size, char* panel, cudaStream_t stream) {
  const MatmulGradient& call = gradient.call;
  const int64_t columns = gradient.outer.columns;
  const int64_t item = ItemSize(gradient.dtype);
  const char* source = panel;
  if (gradient.is_padded()) {
    char* compact = panel + gradient.panels.second_offset;
    Check(cudaMemcpy2DAsync(compact, columns * item, panel, gradient.pitch * item, columns * item, size,
                            cudaMemcpyDeviceToDevice, stream),
          "removing the padding of a panel of the gradient");
    source = compact;
  }
  char* place = static_cast<char*>(call.destination) + begin * columns * ItemSize(call.destination_dtype);
  const Dtype round_to = call.round_to.value_or(Dtype::kFloat32);
  const Conversion conversion = {gradient.dtype, call.destination_dtype, source,  place,
                                 size * columns, call.accumulate,        round_to};
  if (!IsCopy(conversion)) return Convert(conversion, kBlocksOfLink, stream);
  Check(cudaMemcpyAsync(place, source, size * columns * item, cudaMemcpyDeviceToHost, stream),
        "copying a panel of the gradient to the destination");
}

}  // namespace

void RunMatmul(Device& device, const Matmul& call, cudaStream_t stream) {
  if (call.m == 0 || call.n == 0) return;
  const Weight weight(call);
  const cudaStream_t copies = device.panels_in.get();
  const EventPool::Lease arrived[2] = {device.events.Lend(), device.events.Lend()};
  const EventPool::Lease used[2] = {device.events.Lend(), device.events.Lend()};
  // Earlier work may still use the scratch, whose memory XLA reuses.
  for (const EventPool::Lease& event : used) event->Record(stream);
  DrainOnFailure drain(copies);
  ForEachPanel(weight.panels, call.n, call.scratch, [&](int64_t begin, int64_t size, int half, char* panel) {
    used[half]->Hold(copies);
    CopyPanel(weight, begin, size, panel, copies);
    arrived[half]->Record(copies);
    arrived[half]->Hold(stream);
    if (weight.is_cast()) {
      char* cast = panel + weight.panels.second_offset;
      const int64_t num_items = weight.NumRows(size) * weight.Pitch(size);
      Convert({call.w_dtype, call.x_dtype, panel, cast, num_items, false}, kBlocksOfDevice, stream);
      panel = cast;
    }
    device.multiplier.Multiply(ProductOf(weight, begin, size, panel), stream);
    used[half]->Record(stream);
  });
  drain.Done();
}

void RunMatmulGradient(Device& device, const MatmulGradient& call, cudaStream_t stream) {
  const Outer outer = OuterOf(call);
  if (outer.rows == 0 || outer.columns == 0) return;
  const Gradient gradient(call, device.num_multiprocessors);
  const cudaStream_t writes = device.panels_out.get();
  const EventPool::Lease made = device.events.Lend();
  const EventPool::Lease written[2] = {device.events.Lend(), device.events.Lend()};
  DrainOnFailure drain(writes);
  int last = 0;
  ForEachPanel(gradient.panels, outer.rows, call.scratch, [&](int64_t begin, int64_t size, int half, char* panel) {
    if (begin >= 2 * gradient.panels.num_slices) written[half]->Hold(stream);
    device.multiplier.Multiply(ProductOf(gradient, begin, size, panel), stream);
    made->Record(stream);
    made->Hold(writes);
    WritePanel(gradient, begin, size, panel, writes);
    written[half]->Record(writes);
    last = half;
  });
  // Writes run in order, so the last one ends last.
  written[last]->Hold(stream);
  drain.Done();
}

void PlanMatmul(Device& device, const Matmul& call) {
  const Weight weight(call);
  ForEachPanel(weight.panels, call.n, nullptr, [&](int64_t begin, int64_t size, int, const char* panel) {
    device.multiplier.Prepare(ProductOf(weight, begin, size, panel));
  });
}

void PlanMatmulGradient(Device& device, const MatmulGradient& call) {
  const Gradient gradient(call, device.num_multiprocessors);
  ForEachPanel(gradient.panels, gradient.outer.rows, nullptr, [&](int64_t begin, int64_t size, int, char* panel) {
    device.multiplier.Prepare(ProductOf(gradient, begin, size, panel));
  });
}

}  // namespace jaxferry::cuda
