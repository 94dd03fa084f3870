// A CUDA without a card: a device guard and hooks that do nothing, so that fake tensors on "cuda" run backward in a
// CPU build of torch. Loaded before torch, which looks the hooks up once (native.py).
#include <ATen/CPUGeneratorImpl.h>
#include <ATen/detail/CUDAHooksInterface.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <cstdlib>

namespace {

thread_local c10::DeviceIndex current = 0;

c10::DeviceIndex count() {
  const char* number = std::getenv("TWIN_GPUS");
  return static_cast<c10::DeviceIndex>(number ? std::atoi(number) : 1);
}

c10::DeviceIndex exchange(c10::DeviceIndex index) {
  const auto old = current;
  if (index >= 0) current = index;
  return old;
}

struct Guard final : c10::impl::DeviceGuardImplInterface {
  static c10::Device at(c10::DeviceIndex index) { return {c10::DeviceType::CUDA, index < 0 ? current : index}; }
  c10::DeviceType type() const override { return c10::DeviceType::CUDA; }
  c10::Device exchangeDevice(c10::Device device) const override { return at(exchange(device.index())); }
  c10::Device getDevice() const override { return at(current); }
  void setDevice(c10::Device device) const override { exchange(device.index()); }
  void uncheckedSetDevice(c10::Device device) const noexcept override { exchange(device.index()); }
  c10::Stream getStream(c10::Device device) const override {
    return c10::Stream(c10::Stream::DEFAULT, at(device.index()));
  }
  c10::Stream getNewStream(c10::Device device, int) const override { return getStream(device); }
  c10::Stream getDefaultStream(c10::Device device) const override { return getStream(device); }
  c10::Stream exchangeStream(c10::Stream stream) const override { return getStream(stream.device()); }
  c10::DeviceIndex deviceCount() const noexcept override { return count(); }
  void record(void**, const c10::Stream&, const c10::DeviceIndex, const c10::EventFlag) const override {}
  void block(void*, const c10::Stream&) const override {}
  bool queryEvent(void*) const override { return true; }
  void destroyEvent(void*, const c10::DeviceIndex) const noexcept override {}
  bool queryStream(const c10::Stream&) const override { return true; }
  void synchronizeStream(const c10::Stream&) const override {}
};

}  // namespace

namespace c10::impl {
static DeviceGuardImplRegistrar twin_guard(c10::DeviceType::CUDA, new Guard());
}

namespace at {

struct CUDAHooks : CUDAHooksInterface {
  CUDAHooks(CUDAHooksArgs) {}
  void init() const override {}
  bool hasCUDA() const override { return true; }
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasPrimaryContext(DeviceIndex) const override { return true; }
  DeviceIndex deviceCount() const override { return count(); }
  int getNumGPUs() const override { return count(); }
  DeviceIndex current_device() const override { return current; }
  void setCurrentDevice(DeviceIndex index) const override { current = index; }
  DeviceIndex getCurrentDevice() const override { return current; }
  DeviceIndex exchangeDevice(DeviceIndex index) const override { return exchange(index); }
  DeviceIndex maybeExchangeDevice(DeviceIndex index) const override { return exchange(index); }
  void deviceSynchronize(DeviceIndex) const override {}
  const Generator& getDefaultGenerator(DeviceIndex = -1) const override { return detail::getDefaultCPUGenerator(); }
  Generator getNewGenerator(DeviceIndex = -1) const override { return make_generator<CPUGeneratorImpl>(); }
};

REGISTER_CUDA_HOOKS(CUDAHooks)

}  // namespace at
