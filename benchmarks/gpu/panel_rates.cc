// Times how panels of a matrix in host memory arrive on the device: by a copy engine, and by the kernel of `ReadRows`.
// Usage: panel_rates MIB; prints a line of JSON for each width of a panel. panel_rates.py builds and runs it.
#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <vector>

#include "cuda/errors.h"
#include "cuda/kernels.h"
#include "cuda/owners.h"
#include "cuda/panels.h"

namespace {

using jaxferry::cuda::Check;

constexpr int kRepetitions = 5;

// Returns the seconds between two events around what `issue` puts on the stream.
template <typename Issue>
double SecondsOf(cudaStream_t stream, Issue&& issue) {
  jaxferry::cuda::Event begin(cudaEventDefault), end(cudaEventDefault);
  begin.Record(stream);
  issue();
  end.Record(stream);
  end.Synchronize();
  return begin.SecondsTo(end);
}

double Median(std::vector<double> values) {
  std::nth_element(values.begin(), values.begin() + values.size() / 2, values.end());
  return values[values.size() / 2];
}

void Measure(void* host, void* device, int64_t matrix_bytes, int64_t pitch, int64_t row_bytes, cudaStream_t stream) {
  const int64_t num_rows = matrix_bytes / pitch;
  std::vector<double> engine, kernel, plain;
  for (int i = 0; i <= kRepetitions; ++i) {
    const double engine_s = SecondsOf(stream, [&] {
      Check(cudaMemcpy2DAsync(device, row_bytes, host, pitch, row_bytes, num_rows, cudaMemcpyHostToDevice, stream),
            "copying a panel");
    });
    const double kernel_s = SecondsOf(stream, [&] {
      jaxferry::cuda::ReadRows({host, device, num_rows, row_bytes, pitch, row_bytes}, stream);
    });
    const double plain_s = SecondsOf(stream, [&] {
      Check(cudaMemcpyAsync(device, host, num_rows * row_bytes, cudaMemcpyHostToDevice, stream), "copying");
    });
    if (i == 0) continue;  // the first call loads the kernel
    engine.push_back(engine_s);
    kernel.push_back(kernel_s);
    plain.push_back(plain_s);
  }
  std::printf(
      "{\"pitch_bytes\": %lld, \"row_bytes\": %lld, \"num_bytes\": %lld, \"engine_s\": %.9f, \"kernel_s\": %.9f, "
      "\"plain_s\": %.9f, \"is_for_copy_engine\": %s}\n",
      static_cast<long long>(pitch), static_cast<long long>(row_bytes), static_cast<long long>(num_rows * row_bytes),
      Median(engine), Median(kernel), Median(plain),
      jaxferry::cuda::IsForCopyEngine(row_bytes, pitch) ? "true" : "false");
  std::fflush(stdout);
}

}  // namespace

int main(int count, char** arguments) try {
  const int64_t bytes = (count > 1 ? std::atoll(arguments[1]) : 512) << 20;
  jaxferry::cuda::Stream stream;
  jaxferry::cuda::DeviceBuffer device(bytes);
  void* host = nullptr;
  Check(cudaHostAlloc(&host, bytes, cudaHostAllocPortable), "allocating pinned memory");
  std::memset(host, 1, bytes);
  for (const int64_t pitch : {8192, 32768, 65536}) {
    for (int64_t row_bytes = 64; row_bytes <= 8192; row_bytes *= 2) {
      Measure(host, device.data(), bytes, pitch, row_bytes, stream.get());
    }
  }
  return 0;
} catch (const std::exception& error) {
  std::fprintf(stderr, "panel_rates: %s\n", error.what());
  return 1;
}
