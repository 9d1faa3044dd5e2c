// The latest marks of each token: start and end of the marked work. No XLA types, no CUDA types.
#ifndef JAXFERRY_COMMON_MARK_LISTS_H_
#define JAXFERRY_COMMON_MARK_LISTS_H_

#include <atomic>
#include <cstdint>
#include <deque>
#include <map>
#include <mutex>
#include <optional>
#include <utility>

namespace jaxferry {

// The queue that a mark follows.
enum class MarkQueue { kProgram = 0, kLoads = 1, kStores = 2 };

// A token is an address that nothing else uses while its list is open. `Span` gives the start and end of marked work,
// possibly later.
template <typename Span>
class MarkLists {
 public:
  // Starts an empty list that keeps the latest `capacity` marks.
  void Open(const void* token, int64_t capacity) {
    std::lock_guard<std::mutex> lock(mutex_);
    lists_[token] = List{capacity, 0, {}};
    num_open_ = static_cast<int64_t>(lists_.size());
  }

  void Close(const void* token) {
    std::lock_guard<std::mutex> lock(mutex_);
    lists_.erase(token);
    num_open_ = static_cast<int64_t>(lists_.size());
  }

  // Whether any list is open.
  bool IsAnyOpen() const { return num_open_.load(std::memory_order_relaxed) > 0; }

  // Drops the span if the token's list is not open.
  void Add(const void* token, Span span) {
    std::lock_guard<std::mutex> lock(mutex_);
    const auto found = lists_.find(token);
    if (found == lists_.end()) return;
    List& list = found->second;
    list.last.push_back(std::move(span));
    ++list.num_added;
    if (static_cast<int64_t>(list.last.size()) > list.capacity) list.last.pop_front();
  }

  // Returns the mark of this number, counted from 0 since the list was opened; nothing if missing or no longer kept.
  std::optional<Span> Find(const void* token, int64_t number) const {
    std::lock_guard<std::mutex> lock(mutex_);
    const auto found = lists_.find(token);
    if (found == lists_.end()) return std::nullopt;
    const List& list = found->second;
    const int64_t place = number - (list.num_added - static_cast<int64_t>(list.last.size()));
    if (place < 0 || number >= list.num_added) return std::nullopt;
    return list.last[static_cast<size_t>(place)];
  }

 private:
  struct List {
    int64_t capacity, num_added;
    std::deque<Span> last;
  };

  mutable std::mutex mutex_;
  std::map<const void*, List> lists_;
  std::atomic<int64_t> num_open_{0};
};

}  // namespace jaxferry

#endif  // JAXFERRY_COMMON_MARK_LISTS_H_
