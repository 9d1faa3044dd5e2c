// Copies within host memory. No XLA types.
#ifndef JAXFERRY_CPU_COPY_H_
#define JAXFERRY_CPU_COPY_H_

#include <cstring>

#include "common/calls.h"
#include "cpu/convert.h"

namespace jaxferry {

inline void RunCopy(const Copy& copy) {
  if (copy.bytes == 0) return;
  if (copy.add) {
    Add(*copy.add, copy.source, *copy.add, copy.destination, copy.bytes / ItemSize(*copy.add));
  } else {
    std::memcpy(copy.destination, copy.source, copy.bytes);
  }
}

// Returns the part of a copy that starts at a byte.
inline Copy PartOf(const Copy& copy, int64_t start, int64_t bytes) {
  return {static_cast<const char*>(copy.source) + start, static_cast<char*>(copy.destination) + start, bytes, copy.add};
}

}  // namespace jaxferry

#endif  // JAXFERRY_CPU_COPY_H_
