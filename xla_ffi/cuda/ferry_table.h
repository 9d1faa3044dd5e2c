// Copies in flight, looked up by the addresses that they read and write. No CUDA types.
#ifndef JAXFERRY_CUDA_FERRY_TABLE_H_
#define JAXFERRY_CUDA_FERRY_TABLE_H_

#include <cstdint>
#include <list>
#include <utility>

#include "common/calls.h"

namespace jaxferry::cuda {

inline bool Overlap(const Range& a, const Range& b) {
  const auto begin_a = reinterpret_cast<std::uintptr_t>(a.data);
  const auto begin_b = reinterpret_cast<std::uintptr_t>(b.data);
  return begin_a < begin_b + static_cast<std::uint64_t>(b.bytes) &&
         begin_b < begin_a + static_cast<std::uint64_t>(a.bytes);
}

// `Ended` tells when a call's copies have ended; the table only stores it.
template <typename Ended>
class FerryTable {
 public:
  void Add(const Copies& copies, Ended ended) {
    Ranges ranges;
    for (const Copy& copy : copies) {
      if (copy.bytes == 0) continue;
      ranges.push_back({copy.source, copy.bytes});
      ranges.push_back({copy.destination, copy.bytes});
    }
    entries_.push_back({std::move(ranges), std::move(ended)});
  }

  // Calls `visit(ended)` for each call that copies to or from one of the ranges.
  template <typename Visit>
  void ForEachIn(const Ranges& ranges, Visit&& visit) const {
    for (const Entry& entry : entries_) {
      if (Touches(entry.ranges, ranges)) visit(entry.ended);
    }
  }

  template <typename HasEnded>
  void Forget(HasEnded&& has_ended) {
    entries_.remove_if([&](const Entry& entry) { return has_ended(entry.ended); });
  }

  size_t size() const { return entries_.size(); }

 private:
  struct Entry {
    Ranges ranges;
    Ended ended;
  };

  static bool Touches(const Ranges& of_copies, const Ranges& wanted) {
    for (const Range& range : wanted) {
      if (range.bytes == 0) continue;
      for (const Range& copied : of_copies) {
        if (Overlap(range, copied)) return true;
      }
    }
    return false;
  }

  std::list<Entry> entries_;
};

}  // namespace jaxferry::cuda

#endif  // JAXFERRY_CUDA_FERRY_TABLE_H_
