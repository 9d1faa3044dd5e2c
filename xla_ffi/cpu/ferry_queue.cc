#include "cpu/ferry_queue.h"

#include <algorithm>
#include <cmath>
#include <utility>

#include "cpu/copy.h"

namespace jaxferry {

namespace {

// Copies are cut into pieces of about two milliseconds of link time: long enough for exact sleeps, short enough to stop
// soon.
constexpr double kPieceSeconds = 2e-3;
constexpr double kSmallestPiece = 1 << 14;
constexpr double kLargestPiece = 1 << 24;

int64_t PieceBytes(double bytes_per_s) {
  if (bytes_per_s <= 0) return static_cast<int64_t>(kLargestPiece);
  const double bytes = std::clamp(bytes_per_s * kPieceSeconds, kSmallestPiece, kLargestPiece);
  return static_cast<int64_t>(bytes) / 64 * 64;
}

bool Overlap(const void* data, int64_t bytes, const Range& range) {
  const uintptr_t start = reinterpret_cast<uintptr_t>(data);
  const uintptr_t range_start = reinterpret_cast<uintptr_t>(range.data);
  return bytes > 0 && range.bytes > 0 && start < range_start + range.bytes && range_start < start + bytes;
}

bool Touch(const Copies& copies, const Ranges& ranges) {
  return std::any_of(copies.begin(), copies.end(), [&](const Copy& copy) {
    return std::any_of(ranges.begin(), ranges.end(), [&](const Range& range) {
      return Overlap(copy.source, copy.bytes, range) || Overlap(copy.destination, copy.bytes, range);
    });
  });
}

}  // namespace

bool FerryQueue::Push(Copies copies) { return Push(Transfer{std::move(copies), Clock::now(), {}, nullptr}); }

void FerryQueue::Mark(std::shared_ptr<Times> times) { Push(Transfer{{}, Clock::now(), {}, std::move(times)}); }

bool FerryQueue::Push(Transfer transfer) {
  {
    std::lock_guard<std::mutex> lock(mutex_);
    if (is_stopped_) return false;
    if (!worker_.joinable()) worker_ = std::thread([this] { Work(); });
    transfers_.push_back(std::move(transfer));
    // Only a worker with an empty queue waits for copies.
    if (transfers_.size() > 1) return true;
  }
  // Without the lock, so that the thread that wakes finds it free.
  changed_.notify_all();
  return true;
}

bool FerryQueue::CallWhenDone(const Ranges& ranges, const std::function<void()>& callback) {
  std::lock_guard<std::mutex> lock(mutex_);
  // FIFO: the last copy that touches the bytes ends last.
  const auto last = std::find_if(transfers_.rbegin(), transfers_.rend(),
                                 [&](const Transfer& transfer) { return Touch(transfer.copies, ranges); });
  if (last == transfers_.rend()) return false;
  last->callbacks.push_back(callback);
  return true;
}

void FerryQueue::WaitFor(const Ranges& ranges) {
  std::unique_lock<std::mutex> lock(mutex_);
  changed_.wait(lock, [&] {
    return is_stopped_ || std::none_of(transfers_.begin(), transfers_.end(), [&](const Transfer& transfer) {
             return Touch(transfer.copies, ranges);
           });
  });
}

void FerryQueue::Synchronize() {
  std::unique_lock<std::mutex> lock(mutex_);
  changed_.wait(lock, [&] { return transfers_.empty() || is_stopped_; });
}

void FerryQueue::NoteSettings() {
  std::lock_guard<std::mutex> lock(mutex_);
  changed_.notify_all();
}

void FerryQueue::Stop() {
  {
    std::lock_guard<std::mutex> lock(mutex_);
    is_stopped_ = true;
    changed_.notify_all();
  }
  if (worker_.joinable()) worker_.join();
}

void FerryQueue::Work() {
  std::unique_lock<std::mutex> lock(mutex_);
  while (true) {
    changed_.wait(lock, [&] { return !transfers_.empty() || is_stopped_; });
    if (is_stopped_) return;
    const Transfer& transfer = transfers_.front();
    lock.unlock();
    Run(transfer);
    lock.lock();
    if (is_stopped_) return;
    std::vector<std::function<void()>> callbacks = std::move(transfers_.front().callbacks);
    transfers_.pop_front();
    changed_.notify_all();
    for (std::function<void()>& callback : callbacks) callbacks_.Post(std::move(callback));
  }
}

void FerryQueue::Run(const Transfer& transfer) {
  if (transfer.mark != nullptr) {
    transfer.mark->start_s = Seconds(marked_start_.value_or(link_is_free_));
    transfer.mark->end_s = Seconds(link_is_free_);
    marked_start_.reset();
    return;
  }
  // An idle link accumulates no credit; a busy one continues where the last copy ended, whenever this thread woke up.
  link_is_free_ = std::max(link_is_free_, transfer.pushed);
  if (!marked_start_) marked_start_ = link_is_free_;
  for (const Copy& copy : transfer.copies) {
    const double longest_delay_s = settings_.delay_s.load();
    link_is_free_ += DrawDelay(longest_delay_s);
    if (!SleepUntilFree(settings_.delay_s, longest_delay_s)) return;
    RunPieces(copy);
  }
}

void FerryQueue::RunPieces(const Copy& copy) {
  for (int64_t start = 0; start < copy.bytes;) {
    const double bytes_per_s = settings_.bytes_per_s.load();
    const int64_t bytes = std::min(PieceBytes(bytes_per_s), copy.bytes - start);
    RunCopy(PartOf(copy, start, bytes));
    start += bytes;
    if (bytes_per_s > 0) {
      const std::chrono::duration<double> carried(static_cast<double>(bytes) / bytes_per_s);
      link_is_free_ += std::chrono::duration_cast<Clock::duration>(carried);
    } else {
      link_is_free_ = Clock::now();
    }
    if (!SleepUntilFree(settings_.bytes_per_s, bytes_per_s)) return;
  }
}

// A setting that is no longer what the time was computed from frees the link at once. Returns false if the queue was
// stopped meanwhile.
bool FerryQueue::SleepUntilFree(const std::atomic<double>& setting, double was) {
  std::unique_lock<std::mutex> lock(mutex_);
  const auto is_over = [&] { return is_stopped_ || setting.load() != was; };
  if (link_is_free_ > Clock::now() && changed_.wait_until(lock, link_is_free_, is_over)) link_is_free_ = Clock::now();
  return !is_stopped_;
}

Clock::duration FerryQueue::DrawDelay(double longest_s) {
  if (const unsigned num_seeds = settings_.num_seeds.load(); num_seeds != seeds_seen_) {
    seeds_seen_ = num_seeds;
    random_.seed(settings_.seed.load());
  }
  if (longest_s <= 0) return Clock::duration::zero();
  const std::chrono::duration<double> delay(std::uniform_real_distribution<double>(0.0, longest_s)(random_));
  return std::chrono::duration_cast<Clock::duration>(delay);
}

}  // namespace jaxferry
