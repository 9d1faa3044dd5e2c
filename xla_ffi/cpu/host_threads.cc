#include "cpu/host_threads.h"

#include <pthread.h>
#include <sched.h>

#include <algorithm>
#include <cstdlib>
#include <system_error>

namespace jaxferry {

namespace {

// Never destroyed, and abandoned by a forked child, like the ferry's queues; ferry.cc gives the reasons.
std::atomic<HostThreads*> host_threads{nullptr};

struct StopHostThreadsAtExit {
  ~StopHostThreadsAtExit() {
    if (HostThreads* threads = host_threads.load()) threads->Stop();
  }
} stop_host_threads_at_exit;

std::atomic<int64_t> chosen_threads{0};

// The CPUs on which this process may run; the machine's own number may be larger under taskset or a job scheduler.
int64_t NumCpus() {
  constexpr int kMostCpus = 1 << 20;
  for (int num_cpus = CPU_SETSIZE; num_cpus <= kMostCpus; num_cpus *= 2) {
    cpu_set_t* allowed = CPU_ALLOC(num_cpus);
    if (allowed == nullptr) break;
    const size_t num_bytes = CPU_ALLOC_SIZE(num_cpus);
    // It fails where the kernel knows more CPUs than the set has room for.
    const int count = sched_getaffinity(0, num_bytes, allowed) == 0 ? CPU_COUNT_S(num_bytes, allowed) : 0;
    CPU_FREE(allowed);
    if (count > 0) return count;
  }
  return std::max<int64_t>(std::thread::hardware_concurrency(), 1);
}

int64_t DefaultThreads() {
  static const int64_t count = [] {
    const char* text = std::getenv("JAXFERRY_HOST_THREADS");
    const int64_t wanted = text == nullptr ? 0 : std::strtoll(text, nullptr, 10);
    return wanted > 0 ? wanted : NumCpus();
  }();
  return count;
}

}  // namespace

HostThreads& HostThreads::Get() {
  static const bool is_made = [] {
    host_threads.store(new HostThreads);
    pthread_atfork(nullptr, nullptr, [] { host_threads.store(new HostThreads); });
    return true;
  }();
  static_cast<void>(is_made);
  return *host_threads.load();
}

int64_t HostThreads::NumThreads() {
  const int64_t chosen = chosen_threads.load();
  return chosen > 0 ? chosen : DefaultThreads();
}

void HostThreads::SetNumThreads(int64_t count) { chosen_threads.store(count); }

void HostThreads::Run(Work work, const void* data, int64_t num_chunks, int64_t max_threads) {
  Job job{work, data, num_chunks, std::min({NumThreads(), num_chunks, max_threads}) - 1};
  if (job.num_helpers_wanted <= 0) return Take(job);
  {
    std::lock_guard<std::mutex> lock(mutex_);
    if (StartThreads(job.num_helpers_wanted)) {
      Job** last = &first_;
      while (*last != nullptr) last = &(*last)->following;
      *last = &job;
    }
  }
  // All of a hundred threads would wake for a job of two.
  for (int64_t helper = 0; helper < job.num_helpers_wanted; ++helper) posted_.notify_one();
  Take(job);
  std::unique_lock<std::mutex> lock(mutex_);
  Remove(job);
  done_.wait(lock, [&] { return job.num_helpers == 0; });
}

void HostThreads::Stop() {
  {
    std::lock_guard<std::mutex> lock(mutex_);
    is_stopped_ = true;
    posted_.notify_all();
  }
  for (std::thread& thread : threads_) thread.join();
  threads_.clear();
}

void HostThreads::Take(Job& job) {
  for (int64_t chunk; (chunk = job.next.fetch_add(1)) < job.num_chunks;) job.work(job.data, chunk);
}

HostThreads::Job* HostThreads::FindJob() {
  for (Job* job = first_; job != nullptr; job = job->following) {
    if (job->num_helpers < job->num_helpers_wanted && job->next.load() < job->num_chunks) return job;
  }
  return nullptr;
}

void HostThreads::Remove(Job& job) {
  for (Job** place = &first_; *place != nullptr; place = &(*place)->following) {
    if (*place == &job) {
      *place = job.following;
      return;
    }
  }
}

// Returns false if no thread can be started.
bool HostThreads::StartThreads(int64_t count) {
  while (!is_stopped_ && static_cast<int64_t>(threads_.size()) < count) {
    try {
      threads_.emplace_back([this] { Help(); });
    } catch (const std::system_error&) {
      break;
    }
  }
  return !is_stopped_ && !threads_.empty();
}

void HostThreads::Help() {
  std::unique_lock<std::mutex> lock(mutex_);
  while (true) {
    Job* job = nullptr;
    posted_.wait(lock, [&] { return is_stopped_ || (job = FindJob()) != nullptr; });
    if (is_stopped_) return;
    ++job->num_helpers;
    lock.unlock();
    Take(*job);
    lock.lock();
    if (--job->num_helpers == 0) done_.notify_all();
  }
}

}  // namespace jaxferry
