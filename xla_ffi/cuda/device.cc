#include "cuda/device.h"

#include <memory>

namespace jaxferry::cuda {

namespace {

struct Registry {
  std::mutex mutex;
  std::map<int, std::unique_ptr<Device>> devices;
};

Registry& TheRegistry() {
  static auto* registry = new Registry;
  return *registry;
}

int CountMultiprocessors(int ordinal) {
  int count = 0;
  Check(cudaDeviceGetAttribute(&count, cudaDevAttrMultiProcessorCount, ordinal), "counting multiprocessors");
  return count;
}

}  // namespace

Device::Device(int ordinal) : num_multiprocessors(CountMultiprocessors(ordinal)) {}

Device& Device::Get(int ordinal) {
  Registry& registry = TheRegistry();
  std::lock_guard<std::mutex> lock(registry.mutex);
  std::unique_ptr<Device>& device = registry.devices[ordinal];
  if (device == nullptr) device = std::make_unique<Device>(ordinal);
  return *device;
}

std::map<int, Device*> Device::All() {
  Registry& registry = TheRegistry();
  std::lock_guard<std::mutex> lock(registry.mutex);
  std::map<int, Device*> devices;
  for (const auto& [ordinal, device] : registry.devices) {
    if (device != nullptr) devices[ordinal] = device.get();
  }
  return devices;
}

}  // namespace jaxferry::cuda
