// The library's description and settings, and the scratch operation.
#include "common/checks.h"
#include "common/exports.h"
#include "cpu/blas.h"
#include "cpu/ferry.h"
#include "cpu/host_step_kernels.h"
#include "cpu/host_sums.h"
#include "cpu/host_threads.h"
#include "cpu/split_master.h"

#define JAXFERRY_QUOTE_(text) #text
#define JAXFERRY_QUOTE(text) JAXFERRY_QUOTE_(text)

#ifndef JAXFERRY_JAXLIB_VERSION
#define JAXFERRY_JAXLIB_VERSION "unknown"
#endif

#ifdef __clang__
#define JAXFERRY_COMPILER __VERSION__
#else
#define JAXFERRY_COMPILER "GCC " __VERSION__
#endif

namespace jaxferry {

static ffi::Error Scratch(ffi::Result<ffi::AnyBuffer>) { return ffi::Error::Success(); }

XLA_FFI_DEFINE_HANDLER_SYMBOL(jaxferry_scratch, Scratch, ffi::Ffi::Bind().Ret<ffi::AnyBuffer>());

}  // namespace jaxferry

const char* jaxferry_build_info() {
  return "{\"platform\": \"cpu\", \"compiler\": \"" JAXFERRY_COMPILER "\", \"jaxlib\": \"" JAXFERRY_JAXLIB_VERSION
         "\", \"ffi_major\": " JAXFERRY_QUOTE(XLA_FFI_API_MAJOR) ", \"ffi_minor\": " JAXFERRY_QUOTE(
             XLA_FFI_API_MINOR) "}";
}

int jaxferry_abi() { return JAXFERRY_ABI; }

void jaxferry_ferry_synchronize() { jaxferry::Ferry::Get().Synchronize(); }

int jaxferry_ferry_wait_for(int64_t count, const void* const* data, const int64_t* bytes) {
  jaxferry::Ferry::Get().WaitFor(jaxferry::RangesOf(count, data, bytes));
  return 0;
}

void jaxferry_ferry_set_bandwidth(int direction, double bytes_per_s) {
  if (direction < jaxferry::kLoad || direction > jaxferry::kHost) return;
  const jaxferry::Direction which = static_cast<jaxferry::Direction>(direction);
  jaxferry::Ferry::Settings(which).bytes_per_s = bytes_per_s;
  if (which != jaxferry::kHost) jaxferry::Ferry::Get().queue(which).NoteSettings();
}

void jaxferry_ferry_set_delay(double seconds, unsigned seed) {
  for (jaxferry::Direction direction : {jaxferry::kLoad, jaxferry::kStore}) {
    jaxferry::LinkSettings& settings = jaxferry::Ferry::Settings(direction);
    settings.delay_s = seconds;
    settings.seed = seed + direction;
    ++settings.num_seeds;
    jaxferry::Ferry::Get().queue(direction).NoteSettings();
  }
}

void jaxferry_set_blas(void* sgemm) { jaxferry::SetBlas(sgemm); }

int64_t jaxferry_set_host_threads(int64_t count) {
  if (count >= 0) jaxferry::HostThreads::SetNumThreads(count);
  return jaxferry::HostThreads::NumThreads();
}

int jaxferry_set_host_simd(int simd) {
  if (simd >= 0) jaxferry::SetSimd(static_cast<jaxferry::Simd>(simd));
  return static_cast<int>(jaxferry::CurrentSimd());
}

int jaxferry_host_split(const void* masters, const void* copy, int64_t size, void* rest) {
  return jaxferry::SplitMasters(static_cast<const float*>(masters), static_cast<const uint16_t*>(copy), size,
                                jaxferry::RestAt(static_cast<uint16_t*>(rest), size));
}

void jaxferry_host_join(const void* copy, const void* low, const void* up, int64_t size, void* masters) {
  jaxferry::JoinMasters(static_cast<const uint16_t*>(copy), static_cast<const uint16_t*>(low),
                        static_cast<const uint8_t*>(up), size, static_cast<float*>(masters));
}

void jaxferry_host_clear(void* destination, int64_t num_bytes) { jaxferry::ClearOnHost(destination, num_bytes); }

void jaxferry_host_add(int from, const void* source, int to, void* destination, int64_t size, int adds) {
  const auto run = adds ? jaxferry::AddOnHost : jaxferry::CastOnHost;
  run(static_cast<jaxferry::Dtype>(from), source, static_cast<jaxferry::Dtype>(to), destination, size);
}

void jaxferry_host_add_rows(int from, const void* rows, const int32_t* indices, int64_t num_rows, int64_t columns,
                            int to, void* table, int64_t start, int64_t stop) {
  jaxferry::AddRowsOnHost({static_cast<jaxferry::Dtype>(from), rows, indices, num_rows, columns,
                           static_cast<jaxferry::Dtype>(to), table, start, stop});
}
