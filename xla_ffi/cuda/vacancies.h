// Device memory that nothing uses until it is loaded, looked up by address. No CUDA types.
#ifndef JAXFERRY_CUDA_VACANCIES_H_
#define JAXFERRY_CUDA_VACANCIES_H_

#include <algorithm>
#include <cstdint>
#include <iterator>
#include <map>
#include <optional>
#include <vector>

#include "common/calls.h"

namespace jaxferry::cuda {

// `Event` tells when the last use of the memory has run; the table only stores and compares it.
template <typename Event>
class Vacancies {
 public:
  // Memory that was vacant and has then been freed stays here until other memory takes its place. Beyond so many ranges
  // all are forgotten: the next load of each waits for more than it needs, once.
  static constexpr size_t kMostRanges = 1 << 14;

  // Replaces what is known of these bytes.
  void Add(const Ranges& ranges, const Event& last_use) {
    for (const Range& range : ranges) Remove(range);
    if (entries_.size() + ranges.size() > kMostRanges) entries_.clear();
    for (const Range& range : ranges) {
      if (range.bytes > 0) entries_[Begin(range)] = {End(range), last_use};
    }
  }

  // Returns the last uses of these bytes, or nothing if they are not known of each range; forgets them.
  std::optional<std::vector<Event>> Take(const Ranges& ranges) {
    std::vector<Event> found;
    bool is_known = true;
    for (const Range& range : ranges) {
      if (range.bytes == 0) continue;
      const auto entry = FirstIn(range);
      if (entry == entries_.end() || entry->first > Begin(range) || entry->second.end < End(range)) {
        is_known = false;
      } else if (std::find(found.begin(), found.end(), entry->second.last_use) == found.end()) {
        found.push_back(entry->second.last_use);
      }
    }
    for (const Range& range : ranges) Remove(range);
    if (!is_known) return std::nullopt;
    return found;
  }

  size_t size() const { return entries_.size(); }

 private:
  struct Entry {
    std::uintptr_t end;
    Event last_use;
  };
  using Entries = std::map<std::uintptr_t, Entry>;  // by where they begin; they do not overlap

  static std::uintptr_t Begin(const Range& range) { return reinterpret_cast<std::uintptr_t>(range.data); }
  static std::uintptr_t End(const Range& range) { return Begin(range) + static_cast<std::uintptr_t>(range.bytes); }

  // The first entry that ends behind the start of the range.
  typename Entries::iterator FirstIn(const Range& range) {
    auto entry = entries_.upper_bound(Begin(range));
    if (entry != entries_.begin() && std::prev(entry)->second.end > Begin(range)) --entry;
    return entry;
  }

  void Remove(const Range& range) {
    if (range.bytes == 0) return;
    auto entry = FirstIn(range);
    while (entry != entries_.end() && entry->first < End(range)) entry = entries_.erase(entry);
  }

  Entries entries_;
};

}  // namespace jaxferry::cuda

#endif  // JAXFERRY_CUDA_VACANCIES_H_
