// The library's state per device.
#ifndef JAXFERRY_CUDA_DEVICE_H_
#define JAXFERRY_CUDA_DEVICE_H_

#include <map>
#include <mutex>

#include "cuda/ferry_table.h"
#include "cuda/marks.h"
#include "cuda/owners.h"
#include "cuda/product.h"
#include "cuda/vacancies.h"

namespace jaxferry::cuda {

// One per ordinal, made on first use and never freed: CUDA may shut down before static objects are destroyed.
class Device {
 public:
  explicit Device(int ordinal);
  // The current device must be `ordinal`. Throws Failure if the streams cannot be created.
  static Device& Get(int ordinal);
  // Those made so far, by ordinal.
  static std::map<int, Device*> All();

  const int num_multiprocessors;
  // Held while an operation issues work to streams, so that two threads do not interleave.
  std::mutex mutex;
  EventPool events{cudaEventDisableTiming};
  // The ferry's queues. Panels have separate streams, so that they do not wait behind loads of whole layers.
  Stream loads, stores, panels_in, panels_out;
  FerryTable<SharedEvent> ferry;
  Vacancies<SharedEvent> vacancies;
  DeviceMarks marks;
  Multiplier multiplier;
};

}  // namespace jaxferry::cuda

#endif  // JAXFERRY_CUDA_DEVICE_H_
