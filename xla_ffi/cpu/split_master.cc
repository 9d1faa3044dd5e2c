#include "cpu/split_master.h"

#include <algorithm>
#include <atomic>

#include "cpu/bits.h"
#include "cpu/host_threads.h"

namespace jaxferry {

namespace {

constexpr int64_t kMastersInChunk = 1 << 15;
constexpr int64_t kInByte = 8;

struct Splitting {
  const float* masters;
  const uint16_t* copy;
  int64_t size;
  SplitRest rest;
  std::atomic<bool>& is_exact;
};

struct Joining {
  const uint16_t* copy;
  const uint16_t* low;
  const uint8_t* up;
  int64_t size;
  float* masters;
};

int64_t NumMasterChunks(int64_t size) { return (size + kMastersInChunk - 1) / kMastersInChunk; }

void SplitChunk(const void* job, int64_t chunk) {
  const Splitting& s = *static_cast<const Splitting*>(job);
  const int64_t end = std::min(s.size, (chunk + 1) * kMastersInChunk);
  uint32_t wrong = 0;
  for (int64_t start = chunk * kMastersInChunk; start < end; start += kInByte) {
    uint32_t up = 0;
    for (int64_t i = start; i < std::min(start + kInByte, end); ++i) {
      const uint32_t bits = BitsOf(s.masters[i]), difference = s.copy[i] - (bits >> 16);
      s.rest.low[i] = static_cast<uint16_t>(bits);
      wrong |= difference & ~1u;
      up |= (difference & 1) << (i - start);
    }
    s.rest.up[start / kInByte] = static_cast<uint8_t>(up);
  }
  if (wrong != 0) s.is_exact = false;
}

void JoinChunk(const void* job, int64_t chunk) {
  const Joining& j = *static_cast<const Joining*>(job);
  const int64_t end = std::min(j.size, (chunk + 1) * kMastersInChunk);
  for (int64_t start = chunk * kMastersInChunk; start < end; start += kInByte) {
    const uint32_t up = j.up[start / kInByte];
    for (int64_t i = start; i < std::min(start + kInByte, end); ++i) {
      const uint32_t high = j.copy[i] - ((up >> (i - start)) & 1);
      j.masters[i] = FromBits(high << 16 | j.low[i]);
    }
  }
}

}  // namespace

bool SplitMasters(const float* masters, const uint16_t* copy, int64_t size, SplitRest rest) {
  std::atomic<bool> is_exact{true};
  const Splitting job{masters, copy, size, rest, is_exact};
  HostThreads::Get().Run(SplitChunk, &job, NumMasterChunks(size));
  return is_exact;
}

void JoinMasters(const uint16_t* copy, const uint16_t* low, const uint8_t* up, int64_t size, float* masters) {
  const Joining job{copy, low, up, size, masters};
  HostThreads::Get().Run(JoinChunk, &job, NumMasterChunks(size));
}

}  // namespace jaxferry
