// A CUDA device that the CPU plays, for a build of torch that has none: what torch's C++ side asks of a device.
//
// Its memory is the host's, under addresses that nobody can read: a bit is set in them that no address has. Operators
// see the same memory as CPU tensors; whoever else follows a pointer of the device dies, as on a real one he would.

#include <atomic>
#include <chrono>
#include <cstring>
#include <map>
#include <memory>
#include <mutex>
#include <set>
#include <unordered_map>
#include <vector>

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/detail/CUDAHooksInterface.h>
#include <ATen/native/Resize.h>
#include <c10/core/CachingDeviceAllocator.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <c10/core/impl/GPUTrace.h>
#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <torch/csrc/distributed/c10d/reducer_timer.hpp>
#include <torch/extension.h>
#include <torch/library.h>

namespace {

using at::Tensor;
using c10::Device;
using c10::DeviceIndex;
using c10::Stream;
using c10::StreamId;

constexpr auto CUDA = c10::DeviceType::CUDA;
constexpr uintptr_t MARK = uintptr_t{1} << 62;
constexpr size_t ROUNDED_TO = 512;

DeviceIndex device_count = 1;
size_t total_bytes = size_t{16} << 30;
std::atomic<bool> was_asked = false; // whether there is one: a process forked after that has none
thread_local DeviceIndex current_device = 0;
thread_local std::map<DeviceIndex, StreamId> current_streams;

void* marked(void* host) {
  return host ? reinterpret_cast<void*>(reinterpret_cast<uintptr_t>(host) | MARK) : nullptr;
}

void* unmarked(const void* device) {
  return reinterpret_cast<void*>(reinterpret_cast<uintptr_t>(device) & ~MARK);
}

// Tells the CUDA sanitizer, if it listens.
template <typename... Where>
void trace(void (c10::impl::PyInterpreterVTable::*what)(c10::DeviceType, Where...) const, Where... where) {
  if (const auto* listener = c10::impl::GPUTrace::get_trace())
    ((**listener).*what)(CUDA, where...);
}

using Listened = c10::impl::PyInterpreterVTable;

uintptr_t number(const void* pointer) {
  return reinterpret_cast<uintptr_t>(pointer);
}

uintptr_t number(const Stream& stream) {
  return static_cast<uintptr_t>(stream.id());
}

// ------------------------------------------------------------------------------------------------------ memory

struct Block {
  c10::DataPtr host;
  size_t bytes;
  DeviceIndex device;
};

std::mutex memory_lock;
std::map<DeviceIndex, c10::CachingDeviceAllocator::DeviceStats> memory_stats;

template <typename Change>
void count(DeviceIndex device, size_t bytes, Change change) {
  auto& stats = memory_stats[device];
  for (auto* bytes_of : {&stats.allocated_bytes, &stats.reserved_bytes, &stats.active_bytes, &stats.requested_bytes})
    change((*bytes_of)[0], bytes);
  for (auto* number_of : {&stats.allocation, &stats.segment, &stats.active})
    change((*number_of)[0], 1);
}

void free_block(void* context) {
  std::unique_ptr<Block> block(static_cast<Block*>(context));
  trace(&Listened::trace_gpu_memory_deallocation, number(marked(block->host.get())));
  std::lock_guard<std::mutex> guard(memory_lock);
  count(block->device, block->bytes, [](auto& stat, size_t n) { stat.decrease(n); });
}

// Host memory becomes a device's.
c10::DataPtr adopted(c10::DataPtr host, size_t bytes, DeviceIndex device) {
  bytes = (bytes + ROUNDED_TO - 1) / ROUNDED_TO * ROUNDED_TO;
  {
    std::lock_guard<std::mutex> guard(memory_lock);
    const size_t held = memory_stats[device].allocated_bytes[0].current;
    TORCH_CHECK_WITH(
        OutOfMemoryError, held + bytes <= total_bytes, "CUDA out of memory. Tried to allocate ", bytes, " bytes");
    count(device, bytes, [](auto& stat, size_t n) { stat.increase(n); });
  }
  void* data = host.get();
  trace(&Listened::trace_gpu_memory_allocation, number(marked(data)));
  return {marked(data), new Block{std::move(host), bytes, device}, &free_block, Device(CUDA, device)};
}

struct Allocator final : c10::DeviceAllocator {
  c10::DataPtr allocate(size_t bytes) override {
    if (bytes == 0)
      return {nullptr, Device(CUDA, current_device)};
    auto host = c10::GetCPUAllocator()->allocate(bytes);
    std::memset(host.get(), 0xff, bytes); // NaN, in floating point
    return adopted(std::move(host), bytes, current_device);
  }
  c10::DeleterFnPtr raw_deleter() const override {
    return nullptr;
  }
  void copy_data(void* to, const void* from, size_t bytes) const override {
    std::memcpy(unmarked(to), unmarked(from), bytes);
  }
  bool initialized() override {
    return true;
  }
  void emptyCache(c10::MempoolId_t) override {}
  void recordStream(const c10::DataPtr&, Stream) override {}
  c10::CachingDeviceAllocator::DeviceStats getDeviceStats(DeviceIndex device) override {
    std::lock_guard<std::mutex> guard(memory_lock);
    return memory_stats[device];
  }
  void resetAccumulatedStats(DeviceIndex device) override {
    std::lock_guard<std::mutex> guard(memory_lock);
    count(device, 0, [](auto& stat, size_t) { stat.reset_accumulated(); });
  }
  void resetPeakStats(DeviceIndex device) override {
    std::lock_guard<std::mutex> guard(memory_lock);
    count(device, 0, [](auto& stat, size_t) { stat.reset_peak(); });
  }
  std::pair<size_t, size_t> getMemoryInfo(DeviceIndex device) override {
    return {total_bytes - getDeviceStats(device).allocated_bytes[0].current, total_bytes};
  }
};

std::mutex pinned_lock;
std::map<uintptr_t, size_t> pinned; // bytes by where they begin

struct PinnedAllocator final : c10::Allocator {
  c10::DataPtr allocate(size_t bytes) override {
    auto* inner = new c10::DataPtr(c10::GetCPUAllocator()->allocate(bytes));
    std::lock_guard<std::mutex> guard(pinned_lock);
    pinned[reinterpret_cast<uintptr_t>(inner->get())] = bytes;
    return {inner->get(), inner, &free_pinned, Device(c10::DeviceType::CPU)};
  }
  static void free_pinned(void* context) {
    std::unique_ptr<c10::DataPtr> inner(static_cast<c10::DataPtr*>(context));
    std::lock_guard<std::mutex> guard(pinned_lock);
    pinned.erase(reinterpret_cast<uintptr_t>(inner->get()));
  }
  c10::DeleterFnPtr raw_deleter() const override {
    return nullptr;
  }
  void copy_data(void* to, const void* from, size_t bytes) const override {
    std::memcpy(to, from, bytes);
  }
};

// CUDA keeps an error that nobody has asked for, and the thread's next kernel raises it.
constexpr int ALREADY_REGISTERED = 712;
thread_local int last_error = 0;

int host_register(uintptr_t address, size_t bytes) {
  std::lock_guard<std::mutex> guard(pinned_lock);
  return pinned.emplace(address, bytes).second ? 0 : (last_error = ALREADY_REGISTERED);
}

void raise_last_error() {
  if (const auto error = std::exchange(last_error, 0))
    TORCH_CHECK(false, "CUDA error: ", error);
}

void host_unregister(uintptr_t address) {
  std::lock_guard<std::mutex> guard(pinned_lock);
  pinned.erase(address);
}

bool is_pinned(const void* data) {
  const auto address = reinterpret_cast<uintptr_t>(data);
  std::lock_guard<std::mutex> guard(pinned_lock);
  auto next = pinned.upper_bound(address);
  return data && next != pinned.begin() && (--next, address < next->first + std::max<size_t>(next->second, 1));
}

Allocator allocator;
PinnedAllocator pinned_allocator;

// ------------------------------------------------------------------------------------------- streams and events

// A copy between the device and pinned memory of which the host has not heard that it is done. Kernels run at once,
// but what comes to the host arrives only when it waits, and what goes to the device must not have changed by then.
struct Late {
  Tensor host;
  Tensor then; // what was copied, as it was
  bool arrives;
};

using Point = std::set<int64_t>; // the copies that lie before

std::mutex late_lock;
std::map<int64_t, Late> late_copies;
int64_t late_numbers = 0;
std::map<std::pair<DeviceIndex, StreamId>, Point> points;

struct Event {
  Point point;
  std::chrono::steady_clock::time_point time;
};

Stream stream_of(DeviceIndex device) {
  return Stream(Stream::UNSAFE, Device(CUDA, device), current_streams[device]);
}

Point& point_of(const Stream& stream) {
  return points[{stream.device_index(), stream.id()}];
}

void reach(const Point& point) {
  std::vector<Late> reached;
  {
    std::lock_guard<std::mutex> guard(late_lock);
    for (const auto copy : Point(point)) {
      if (auto found = late_copies.find(copy); found != late_copies.end()) {
        reached.push_back(std::move(found->second));
        late_copies.erase(found);
      }
      for (auto& [_, other] : points)
        other.erase(copy);
    }
  }
  for (auto& copy : reached) {
    if (copy.arrives)
      copy.host.copy_(copy.then);
    else
      TORCH_CHECK(
          std::memcmp(copy.host.const_data_ptr(), copy.then.const_data_ptr(), copy.then.nbytes()) == 0,
          "the host wrote to pinned memory (", copy.host.sizes(), " ", copy.host.dtype(),
          ") before a copy of it to the device was known to be done; now ", copy.host, ", then ", copy.then);
  }
}

void synchronize(const Stream& stream) {
  trace(&Listened::trace_gpu_stream_synchronization, number(stream));
  Point point;
  {
    std::lock_guard<std::mutex> guard(late_lock);
    point = point_of(stream);
  }
  reach(point);
}

void synchronize_all() {
  trace(&Listened::trace_gpu_device_synchronization);
  Point all;
  {
    std::lock_guard<std::mutex> guard(late_lock);
    for (const auto& [copy, _] : late_copies)
      all.insert(copy);
  }
  reach(all);
}

bool overlaps(const Tensor& one, const Tensor& other) {
  const auto end = [](const Tensor& tensor) {
    return number(tensor.const_data_ptr()) + at::detail::computeStorageNbytes(
        tensor.sizes(), tensor.strides(), tensor.dtype().itemsize());
  };
  return number(one.const_data_ptr()) < end(other) && number(other.const_data_ptr()) < end(one);
}

// A copy from or to `host` begins on the current stream: earlier copies of these bytes on the way there are done.
void reach_copies_of(const Tensor& host, DeviceIndex device) {
  Point point;
  {
    std::lock_guard<std::mutex> guard(late_lock);
    for (const auto copy : point_of(stream_of(device)))
      if (auto found = late_copies.find(copy); found != late_copies.end() && overlaps(found->second.host, host))
        point.insert(copy);
  }
  reach(point);
}

void be_late(Tensor host, Tensor then, bool arrives, DeviceIndex device) {
  std::lock_guard<std::mutex> guard(late_lock);
  late_copies[late_numbers] = {std::move(host), std::move(then), arrives};
  point_of(stream_of(device)).insert(late_numbers++);
}

struct Guard final : c10::impl::DeviceGuardImplInterface {
  c10::DeviceType type() const override {
    return CUDA;
  }
  Device exchangeDevice(Device device) const override {
    const auto before = getDevice();
    setDevice(device);
    return before;
  }
  Device getDevice() const override {
    return Device(CUDA, current_device);
  }
  void setDevice(Device device) const override {
    TORCH_CHECK(device.index() < device_count, "CUDA error: invalid device ordinal");
    uncheckedSetDevice(device);
  }
  void uncheckedSetDevice(Device device) const noexcept override {
    if (device.has_index())
      current_device = device.index();
  }
  Stream getStream(Device device) const override {
    return stream_of(device.has_index() ? device.index() : current_device);
  }
  Stream getDefaultStream(Device device) const override {
    return Stream(Stream::DEFAULT, device);
  }
  Stream getStreamFromGlobalPool(Device device, bool) const override {
    return getNewStream(device, 0);
  }
  Stream getNewStream(Device device, int) const override {
    static std::atomic<StreamId> next = 1;
    const Stream stream(Stream::UNSAFE, Device(CUDA, device.has_index() ? device.index() : current_device), next++);
    trace(&Listened::trace_gpu_stream_creation, number(stream));
    return stream;
  }
  Stream exchangeStream(Stream stream) const override {
    const auto before = stream_of(stream.device_index());
    current_streams[stream.device_index()] = stream.id();
    return before;
  }
  DeviceIndex deviceCount() const noexcept override {
    was_asked = true;
    return device_count;
  }
  void destroyEvent(void* event, DeviceIndex) const noexcept override {
    trace(&Listened::trace_gpu_event_deletion, number(event));
    delete static_cast<Event*>(event);
  }
  void record(void** event, const Stream& stream, DeviceIndex, c10::EventFlag) const override {
    if (!*event) {
      *event = new Event;
      trace(&Listened::trace_gpu_event_creation, number(*event));
    }
    trace(&Listened::trace_gpu_event_record, number(*event), number(stream));
    std::lock_guard<std::mutex> guard(late_lock);
    *static_cast<Event*>(*event) = {point_of(stream), std::chrono::steady_clock::now()};
  }
  void block(void* event, const Stream& stream) const override {
    if (!event)
      return;
    trace(&Listened::trace_gpu_event_wait, number(event), number(stream));
    std::lock_guard<std::mutex> guard(late_lock);
    for (const auto copy : static_cast<Event*>(event)->point)
      if (late_copies.count(copy))
        point_of(stream).insert(copy);
  }
  bool queryEvent(void* event) const override {
    synchronizeEvent(event);
    return true;
  }
  void synchronizeEvent(void* event) const override {
    if (!event)
      return;
    trace(&Listened::trace_gpu_event_synchronization, number(event));
    reach(static_cast<Event*>(event)->point);
  }
  bool queryStream(const Stream& stream) const override {
    synchronize(stream);
    return true;
  }
  void synchronizeStream(const Stream& stream) const override {
    synchronize(stream);
  }
  void synchronizeDevice(DeviceIndex) const override {
    synchronize_all();
  }
  double elapsedTime(void* first, void* second, DeviceIndex) const override {
    const auto passed = static_cast<Event*>(second)->time - static_cast<Event*>(first)->time;
    return std::chrono::duration<double, std::milli>(passed).count();
  }
};

C10_REGISTER_GUARD_IMPL(CUDA, Guard);

// ----------------------------------------------------------------------------------------------- random numbers

// As on a real device, its state is a seed and how far it has come.
struct PlayedGenerator final : c10::GeneratorImpl {
  uint64_t seed_ = c10::default_rng_seed_val;
  uint64_t offset_ = 0;

  explicit PlayedGenerator(DeviceIndex device)
      : GeneratorImpl(Device(CUDA, device), c10::DispatchKeySet(c10::DispatchKey::CUDA)) {}
  void set_current_seed(uint64_t seed) override {
    seed_ = seed;
    offset_ = 0;
  }
  void set_offset(uint64_t offset) override {
    offset_ = offset;
  }
  uint64_t get_offset() const override {
    return offset_;
  }
  uint64_t current_seed() const override {
    return seed_;
  }
  uint64_t seed() override {
    set_current_seed(c10::detail::getNonDeterministicRandom());
    return seed_;
  }
  void set_state(const c10::TensorImpl& state) override {
    TORCH_CHECK(
        state.device_type() == c10::DeviceType::CPU && state.dtype() == caffe2::TypeMeta::Make<uint8_t>(),
        "RNG state must be a torch.ByteTensor");
    TORCH_CHECK(state.numel() == 16, "RNG state is wrong size");
    std::memcpy(&seed_, state.data(), 8);
    std::memcpy(&offset_, static_cast<const char*>(state.data()) + 8, 8);
  }
  c10::intrusive_ptr<c10::TensorImpl> get_state() const override {
    auto state = at::empty({16}, at::TensorOptions().dtype(at::kByte).device(at::kCPU));
    std::memcpy(state.data_ptr(), &seed_, 8);
    std::memcpy(static_cast<char*>(state.data_ptr()) + 8, &offset_, 8);
    return state.getIntrusivePtr();
  }
  PlayedGenerator* clone_impl() const override {
    auto* copy = new PlayedGenerator(device_.index());
    copy->seed_ = seed_;
    copy->offset_ = offset_;
    return copy;
  }
  // For one operator.
  uint64_t next_seed() {
    std::lock_guard<std::mutex> guard(mutex_);
    offset_ += 4;
    return seed_ * 0x9e3779b97f4a7c15 + offset_;
  }
};

at::Generator& default_generator(DeviceIndex device) {
  static std::map<DeviceIndex, at::Generator> generators;
  auto& found = generators[device < 0 ? current_device : device];
  if (!found.defined())
    found = at::make_generator<PlayedGenerator>(device < 0 ? current_device : device);
  return found;
}

uint64_t next_seed(const at::Generator& generator) {
  return static_cast<PlayedGenerator*>(generator.unsafeGetGeneratorImpl())->next_seed();
}

// --------------------------------------------------------------------------------------------------- what torch asks

struct Hooks final : at::CUDAHooksInterface {
  void init() const override {}
  bool hasCUDA() const override {
    return was_asked = true;
  }
  bool isBuilt() const override {
    return true;
  }
  bool isAvailable() const override {
    return was_asked = true;
  }
  bool hasPrimaryContext(DeviceIndex) const override {
    return true;
  }
  int getNumGPUs() const override {
    return device_count;
  }
  DeviceIndex deviceCount() const override {
    return device_count;
  }
  DeviceIndex current_device() const override {
    return ::current_device;
  }
  DeviceIndex getCurrentDevice() const override {
    return ::current_device;
  }
  void setCurrentDevice(DeviceIndex device) const override {
    Guard().setDevice(Device(CUDA, device));
  }
  DeviceIndex exchangeDevice(DeviceIndex device) const override {
    return Guard().exchangeDevice(Device(CUDA, device)).index();
  }
  DeviceIndex maybeExchangeDevice(DeviceIndex device) const override {
    return exchangeDevice(device < 0 ? ::current_device : device);
  }
  const at::Generator& getDefaultGenerator(DeviceIndex device) const override {
    return default_generator(device);
  }
  at::Generator getNewGenerator(DeviceIndex device) const override {
    return at::make_generator<PlayedGenerator>(device < 0 ? ::current_device : device);
  }
  Device getDeviceFromPtr(void* data) const override {
    TORCH_CHECK(reinterpret_cast<uintptr_t>(data) & MARK, "The specified pointer resides on host memory");
    return Device(CUDA, ::current_device);
  }
  bool isPinnedPtr(const void* data) const override {
    return is_pinned(data);
  }
  c10::Allocator* getPinnedMemoryAllocator() const override {
    return &pinned_allocator;
  }
  c10::Allocator* getCUDADeviceAllocator() const override {
    return &allocator;
  }
  void deviceSynchronize(DeviceIndex) const override {
    synchronize_all();
  }
};

// torch makes its hooks when it asks first, which may have been before: then those become ours.
void install_hooks() {
  static Hooks ours;
  auto& theirs = const_cast<at::CUDAHooksInterface&>(at::detail::getCUDAHooks());
  static_assert(sizeof(Hooks) == sizeof(void*), "nothing but the table of functions");
  std::memcpy(static_cast<void*>(&theirs), static_cast<void*>(&ours), sizeof(void*));
}

// ------------------------------------------------------------------------------------------------------ operators

// The storage as the CPU's, with the same memory, and which keeps it.
c10::Storage host_storage(const c10::Storage& storage) {
  auto* kept = new c10::Storage(storage);
  c10::DataPtr data(
      unmarked(storage.data()), kept, [](void* context) { delete static_cast<c10::Storage*>(context); },
      Device(c10::DeviceType::CPU));
  return c10::make_intrusive<c10::StorageImpl>(
      c10::StorageImpl::use_byte_size_t(), storage.sym_nbytes(), std::move(data), c10::GetCPUAllocator(), true);
}

Tensor like(const Tensor& tensor, c10::Storage storage, c10::DispatchKey key, const Tensor* base = nullptr) {
  // A view of a tensor is one of autograd's where that one is, in inference mode too.
  auto made = base
      ? at::detail::make_tensor<c10::TensorImpl>(
            c10::TensorImpl::VIEW, std::move(storage), base->key_set(), tensor.dtype())
      : at::detail::make_tensor<c10::TensorImpl>(std::move(storage), c10::DispatchKeySet(key), tensor.dtype());
  auto* impl = made.unsafeGetTensorImpl();
  impl->set_sizes_and_strides(tensor.sizes(), tensor.strides(), tensor.storage_offset());
  if (tensor.unsafeGetTensorImpl()->is_wrapped_number())
    impl->set_wrapped_number(true);
  made._set_conj(tensor.is_conj());
  made._set_neg(tensor.is_neg());
  return made;
}

Tensor host_alias(const Tensor& tensor) {
  return tensor.is_cuda() ? like(tensor, host_storage(tensor.storage()), c10::DispatchKey::CPU) : tensor;
}

// One call of an operator: its tensors as the CPU's, and the results as the device's.
class Call {
 public:
  explicit Call(const c10::OperatorHandle& op) : op_(op), name_(op.schema().name()) {}

  void run(torch::jit::Stack* stack) {
    const auto& schema = op_.schema();
    const size_t first = stack->size() - schema.arguments().size();
    for (size_t i = first; i < stack->size(); ++i)
      look_at((*stack)[i], i == first);
    check();
    const auto index = device_.has_index() ? device_.index() : current_device;
    bool takes_generator = false;
    for (size_t i = first; i < stack->size(); ++i) {
      const auto& type = *schema.arguments()[i - first].real_type();
      const bool is_generator = type.str().find("Generator") != std::string::npos;
      takes_generator |= is_generator;
      (*stack)[i] = is_generator ? generator_for((*stack)[i], index) : to_host((*stack)[i]);
    }
    at::AutoDispatchBelowADInplaceOrView below;
    if (name_ == "aten::_local_scalar_dense" || name_ == "aten::nonzero" || name_ == "aten::equal")
      synchronize(stream_of(index));
    if (!takes_generator && op_.hasTag(at::Tag::nondeterministic_seeded)) {
      auto generator = at::detail::getDefaultCPUGenerator();
      const auto state = generator.get_state();
      generator.set_current_seed(next_seed(default_generator(index)));
      op_.callBoxed(stack);
      generator.set_state(state);
    } else {
      op_.callBoxed(stack);
    }
    for (auto& [original, alias] : aliases_)
      follow(original, alias);
    for (size_t i = stack->size() - schema.returns().size(); i < stack->size(); ++i)
      (*stack)[i] = to_device((*stack)[i]);
  }

 private:
  const c10::OperatorHandle& op_;
  const std::string name_;
  Device device_{CUDA, -1};
  std::vector<std::pair<Tensor, bool>> on_cpu_; // and whether in a list
  bool first_on_cpu_ = false;
  std::vector<std::pair<Tensor, Tensor>> aliases_;
  std::unordered_map<c10::StorageImpl*, c10::Storage> to_device_; // by host storage
  std::unordered_map<c10::StorageImpl*, c10::Storage> to_host_; // by the device's

  void look_at(const c10::IValue& value, bool is_first) {
    const auto look = [&](const Tensor& tensor, bool in_list) {
      if (!tensor.defined())
        return;
      if (tensor.is_cuda()) {
        TORCH_CHECK(tensor.layout() == c10::kStrided, name_, ": not played for ", tensor.layout());
        TORCH_CHECK(
            !device_.has_index() || device_ == tensor.device(),
            "Expected all tensors to be on the same device, but found at least two devices, ", device_, " and ",
            tensor.device(), "! (", name_, ")");
        device_ = tensor.device();
      } else {
        on_cpu_.emplace_back(tensor, in_list);
        first_on_cpu_ |= is_first;
      }
    };
    if (value.isTensor())
      look(value.toTensor(), false);
    else if (value.isTensorList())
      for (const Tensor& tensor : value.toTensorList())
        look(tensor, true);
    else if (value.isOptionalTensorList())
      for (const std::optional<Tensor>& tensor : value.toOptionalTensorList())
        look(tensor.value_or(Tensor()), true);
  }

  // As real kernels do: all on one device, but for what a kernel takes as a number, and indices of index.
  void check() const {
    if (on_cpu_.empty())
      return;
    static const std::set<std::string> index = {
        "aten::index", "aten::index_put", "aten::index_put_", "aten::_index_put_impl_", "aten::_unsafe_index",
        "aten::_unsafe_index_put"};
    static const std::set<std::string> takes_numbers = {"aten::where", "aten::fill_", "aten::masked_fill",
                                                        "aten::masked_fill_", "aten::lerp", "aten::lerp_",
                                                        "aten::floor_divide", "aten::floor_divide_"};
    const bool indexes = index.count(name_) && !first_on_cpu_;
    const bool is_number_taken = op_.hasTag(at::Tag::pointwise) || takes_numbers.count(name_) || indexes ||
        name_.rfind("aten::_foreach_", 0) == 0;
    if (name_ == "aten::_pack_padded_sequence")
      return;
    for (const auto& [tensor, in_list] : on_cpu_)
      TORCH_CHECK(
          tensor.device().is_cpu() && (in_list ? indexes : is_number_taken && tensor.dim() == 0),
          "Expected all tensors to be on the same device, but found at least two devices, ", device_, " and ",
          tensor.device(), "! (", name_, ")");
  }

  c10::IValue generator_for(const c10::IValue& given, DeviceIndex device) const {
    const auto generator = given.isNone() ? default_generator(device) : given.toGenerator();
    TORCH_CHECK(
        generator.device().type() == CUDA, "Expected a 'cuda' device type for generator but found '",
        generator.device().type(), "' (", name_, ")");
    return at::detail::createCPUGenerator(next_seed(generator));
  }

  Tensor to_host(const Tensor& tensor) {
    if (!tensor.defined() || !tensor.is_cuda())
      return tensor;
    for (const auto& [original, alias] : aliases_)
      if (original.is_same(tensor))
        return alias;
    auto& host = to_host_[tensor.storage().unsafeGetStorageImpl()];
    if (!host) {
      host = host_storage(tensor.storage());
      to_device_[host.unsafeGetStorageImpl()] = tensor.storage();
    }
    aliases_.emplace_back(tensor, like(tensor, host, c10::DispatchKey::CPU));
    return aliases_.back().second;
  }

  c10::IValue to_host(const c10::IValue& value) {
    if (value.isTensor())
      return to_host(value.toTensor());
    if (value.isTensorList()) {
      c10::List<Tensor> made;
      for (const Tensor& tensor : value.toTensorList())
        made.push_back(to_host(tensor));
      return made;
    }
    if (value.isOptionalTensorList()) {
      c10::List<std::optional<Tensor>> made;
      for (const std::optional<Tensor>& tensor : value.toOptionalTensorList())
        made.push_back(tensor ? std::make_optional(to_host(*tensor)) : std::nullopt);
      return made;
    }
    if (value.isDevice() && value.toDevice().type() == CUDA)
      return Device(c10::DeviceType::CPU);
    return value;
  }

  // What became of an argument that the operator resized, or gave other memory.
  void follow(const Tensor& original, const Tensor& alias) {
    auto* storage = original.storage().unsafeGetStorageImpl();
    auto* host = alias.storage().unsafeGetStorageImpl();
    if (const auto known = to_device_.find(host); known == to_device_.end()) {
      original.unsafeGetTensorImpl()->set_storage_keep_dtype(storage_for(alias));
    } else if (host->data() != unmarked(storage->data())) {
      const auto bytes = host->nbytes();
      storage->set_data_ptr_noswap(adopted(host->set_data_ptr(c10::DataPtr()), bytes, original.device().index()));
      storage->set_nbytes(bytes);
    }
    if (original.sizes() != alias.sizes() || original.strides() != alias.strides() ||
        original.storage_offset() != alias.storage_offset())
      original.unsafeGetTensorImpl()->set_sizes_and_strides(alias.sizes(), alias.strides(), alias.storage_offset());
  }

  c10::Storage storage_for(const Tensor& host) {
    auto* impl = host.storage().unsafeGetStorageImpl();
    auto& storage = to_device_[impl];
    if (!storage) {
      const auto index = device_.has_index() ? device_.index() : current_device;
      const auto bytes = impl->nbytes();
      c10::DataPtr data(nullptr, Device(CUDA, index));
      if (bytes != 0)
        data = adopted(impl->set_data_ptr(c10::DataPtr()), bytes, index);
      storage = c10::make_intrusive<c10::StorageImpl>(
          c10::StorageImpl::use_byte_size_t(), bytes, std::move(data), &allocator, true);
    }
    return storage;
  }

  Tensor to_device(const Tensor& tensor) {
    if (!tensor.defined() || !tensor.device().is_cpu())
      return tensor;
    for (const auto& [original, alias] : aliases_)
      if (alias.is_same(tensor))
        return original;
    for (const auto& [given, _] : on_cpu_)
      if (given.is_same(tensor))
        return tensor;
    const Tensor* base = nullptr;
    for (const auto& [original, alias] : aliases_)
      if (alias.storage().is_alias_of(tensor.storage()))
        base = &original;
    return like(tensor, storage_for(tensor), c10::DispatchKey::CUDA, base);
  }

  c10::IValue to_device(const c10::IValue& value) {
    if (value.isTensor())
      return to_device(value.toTensor());
    if (value.isTensorList()) {
      c10::List<Tensor> made;
      for (const Tensor& tensor : value.toTensorList())
        made.push_back(to_device(tensor));
      return made;
    }
    return value;
  }
};

void call_on_host(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  raise_last_error();
  Call(op).run(stack);
}

DeviceIndex index_of(std::optional<Device> device) {
  const auto index = device && device->has_index() ? device->index() : current_device;
  TORCH_CHECK(index < device_count, "CUDA error: invalid device ordinal");
  return index;
}

Tensor empty_strided(
    c10::SymIntArrayRef size, c10::SymIntArrayRef stride, std::optional<at::ScalarType> dtype,
    std::optional<at::Layout>, std::optional<Device> device, std::optional<bool> pin_memory) {
  TORCH_CHECK(!pin_memory.value_or(false), "Only dense CPU tensors can be pinned");
  c10::OptionalDeviceGuard guard(Device(CUDA, index_of(device)));
  return at::detail::empty_strided_generic(
      C10_AS_INTARRAYREF_SLOW(size), C10_AS_INTARRAYREF_SLOW(stride), &allocator,
      c10::DispatchKeySet(c10::DispatchKey::CUDA), dtype.value_or(at::typeMetaToScalarType(at::get_default_dtype())));
}

Tensor empty(
    c10::SymIntArrayRef size, std::optional<at::ScalarType> dtype, std::optional<at::Layout>,
    std::optional<Device> device, std::optional<bool> pin_memory, std::optional<at::MemoryFormat> format) {
  TORCH_CHECK(!pin_memory.value_or(false), "Only dense CPU tensors can be pinned");
  c10::OptionalDeviceGuard guard(Device(CUDA, index_of(device)));
  return at::detail::empty_generic(
      C10_AS_INTARRAYREF_SLOW(size), &allocator, c10::DispatchKeySet(c10::DispatchKey::CUDA),
      dtype.value_or(at::typeMetaToScalarType(at::get_default_dtype())), format);
}

Tensor& copy_(Tensor& to, const Tensor& from, bool non_blocking) {
  at::AutoDispatchBelowADInplaceOrView below;
  auto to_host = host_alias(to);
  const auto from_host = host_alias(from);
  const bool leaves = from.is_cuda() && to.device().is_cpu();
  const bool enters = to.is_cuda() && from.device().is_cpu();
  const auto& on_host = leaves ? to_host : from_host;
  if ((leaves || enters) && on_host.numel() && is_pinned(on_host.storage().data()))
    reach_copies_of(on_host, (leaves ? from : to).device().index());
  if (leaves && non_blocking && to.numel() && is_pinned(to.storage().data())) {
    be_late(to_host, from_host.clone(), true, from.device().index());
    if (to_host.is_contiguous())
      std::memset(to_host.data_ptr(), 0xff, to_host.nbytes()); // it is anything until then
    return to;
  }
  if (leaves)
    synchronize(stream_of(from.device().index()));
  to_host.copy_(from_host);
  if (enters && non_blocking && from.numel() && from.is_contiguous() && is_pinned(from.storage().data()))
    be_late(from_host, from_host.clone(), false, to.device().index());
  return to;
}

Tensor copy_from(const Tensor& from, const Tensor& to, bool non_blocking) {
  auto target = to;
  return copy_(target, from, non_blocking);
}

Tensor& set_storage(Tensor& self, at::Storage source, c10::SymInt offset, c10::SymIntArrayRef size,
                    c10::SymIntArrayRef stride) {
  TORCH_CHECK(source.device() == self.device(), "Expected storage of ", self.device(), ", not ", source.device());
  auto* impl = self.unsafeGetTensorImpl();
  impl->set_storage_keep_dtype(std::move(source));
  impl->set_storage_offset(0);
  std::vector<int64_t> contiguous(size.size(), 1);
  for (int64_t dim = static_cast<int64_t>(size.size()) - 2; dim >= 0; --dim)
    contiguous[dim] = contiguous[dim + 1] * std::max<int64_t>(size[dim + 1].guard_int(__FILE__, __LINE__), 1);
  const bool given = stride.size() == size.size();
  impl->set_sizes_and_strides(
      C10_AS_INTARRAYREF_SLOW(size), given ? C10_AS_INTARRAYREF_SLOW(stride) : at::IntArrayRef(contiguous),
      offset.guard_int(__FILE__, __LINE__));
  return self;
}

Tensor& set_whole_storage(Tensor& self, at::Storage source) {
  const auto numel = static_cast<int64_t>(source.nbytes() / self.dtype().itemsize());
  const c10::SymInt size(numel);
  return set_storage(self, std::move(source), 0, size, {});
}

Tensor& set_tensor(Tensor& self, const Tensor& source) {
  return set_storage(
      self, source.storage(), source.sym_storage_offset(), source.sym_sizes(), source.sym_strides());
}

Tensor& set_nothing(Tensor& self) {
  return set_storage(self, at::empty({0}, self.options()).storage(), 0, c10::SymInt(0), {});
}

// A storage's own resize, which gives memory back too.
void resize_storage(const Tensor& tensor, size_t bytes) {
  auto* storage = tensor.storage().unsafeGetStorageImpl();
  c10::DeviceGuard guard(tensor.device());
  auto data = allocator.allocate(bytes);
  if (const auto kept = std::min(bytes, storage->nbytes()))
    allocator.copy_data(data.get(), storage->data(), kept);
  storage->set_data_ptr_noswap(std::move(data));
  storage->set_nbytes(bytes);
}

void record_stream(Tensor&, Stream) {}

// The CPU's takes no integers.
Tensor histc(const Tensor& self, int64_t bins, const at::Scalar& min, const at::Scalar& max) {
  return at::histc(self.cpu().to(at::kFloat), bins, min, max).to(self.options());
}

TORCH_LIBRARY_IMPL(_, CUDA, m) {
  m.fallback(torch::CppFunction::makeFromBoxedFunction<&call_on_host>());
}

TORCH_LIBRARY_IMPL(aten, CUDA, m) {
  m.impl("empty.memory_format", empty);
  m.impl("empty_strided", empty_strided);
  m.impl("copy_", copy_);
  m.impl("_copy_from", copy_from);
  m.impl("set_.source_Storage_storage_offset", set_storage);
  m.impl("set_.source_Storage", set_whole_storage);
  m.impl("set_.source_Tensor", set_tensor);
  m.impl("set_", set_nothing);
  m.impl("record_stream", record_stream);
  m.impl("histc", histc);
}

// ---------------------------------------------------------------------------------------------------- collectives

// NCCL's name, gloo's work: tensors of the device are given to it as the host memory that they are.
class Nccl final : public c10d::Backend {
 public:
  Nccl(c10::intrusive_ptr<c10d::Backend> gloo) : Backend(gloo->getRank(), gloo->getSize()), gloo_(std::move(gloo)) {}

  const std::string getBackendName() const override {
    return "nccl";
  }
  bool supportsCoalescing() const override {
    return true;
  }
  void setTimeout(std::chrono::milliseconds timeout) override {
    gloo_->setTimeout(timeout);
  }
  void setSequenceNumberForGroup() override {}
  uint64_t getSequenceNumberForGroup() override {
    return 0;
  }
  void startCoalescing() override {
    coalesced_.emplace();
  }
  c10::intrusive_ptr<c10d::Work> endCoalescing() override {
    const auto works = std::move(*coalesced_);
    coalesced_.reset();
    for (const auto& work : works)
      work->wait();
    return works.empty() ? nullptr : works.back();
  }

  using Tensors = std::vector<Tensor>;
  using Lists = std::vector<Tensors>;
  using Started = c10::intrusive_ptr<c10d::Work>;

  Started broadcast(Tensors& tensors, const c10d::BroadcastOptions& options) override {
    auto host = hosts(tensors);
    return kept(gloo_->broadcast(host, options));
  }
  Started allreduce(Tensors& tensors, const c10d::AllreduceOptions& options) override {
    auto host = hosts(tensors);
    return reduced(options, host, [&](const auto& how) { return gloo_->allreduce(host, how); });
  }
  Started allreduce_coalesced(Tensors& tensors, const c10d::AllreduceCoalescedOptions& options) override {
    Started last;
    for (auto& tensor : tensors) {
      Tensors one = {tensor};
      last = allreduce(one, options);
      last->wait();
    }
    return last;
  }
  Started reduce(Tensors& tensors, const c10d::ReduceOptions& options) override {
    auto host = hosts(tensors);
    return reduced(options, host, [&](const auto& how) { return gloo_->reduce(host, how); });
  }
  Started allgather(Lists& outputs, Tensors& inputs, const c10d::AllgatherOptions& options) override {
    auto to = hosts(outputs);
    auto from = hosts(inputs);
    return kept(gloo_->allgather(to, from, options));
  }
  Started _allgather_base(Tensor& output, Tensor& input, const c10d::AllgatherOptions& options) override {
    auto to = checked(output).view(-1);
    auto from = checked(input).view(-1);
    return kept(gloo_->_allgather_base(to, from, options));
  }
  Started allgather_into_tensor_coalesced(
      Tensors& outputs, Tensors& inputs, const c10d::AllgatherOptions& options) override {
    Started last;
    for (size_t i = 0; i < outputs.size(); ++i)
      (last = _allgather_base(outputs[i], inputs[i], options))->wait();
    return last;
  }
  Started gather(Lists& outputs, Tensors& inputs, const c10d::GatherOptions& options) override {
    auto to = hosts(outputs);
    auto from = hosts(inputs);
    return kept(gloo_->gather(to, from, options));
  }
  Started scatter(Tensors& outputs, Lists& inputs, const c10d::ScatterOptions& options) override {
    auto to = hosts(outputs);
    auto from = hosts(inputs);
    return kept(gloo_->scatter(to, from, options));
  }
  Started reduce_scatter(Tensors& outputs, Lists& inputs, const c10d::ReduceScatterOptions& options) override {
    auto to = hosts(outputs);
    auto from = hosts(inputs);
    return reduced(options, to, [&](const auto& how) { return gloo_->reduce_scatter(to, from, how); });
  }
  Started _reduce_scatter_base(Tensor& output, Tensor& input, const c10d::ReduceScatterOptions& options) override {
    Tensors to = {checked(output).view(-1)};
    auto from = checked(input).view(-1).clone(); // it may be where the output is
    return reduced(options, to, [&](const auto& how) { return gloo_->_reduce_scatter_base(to[0], from, how); });
  }
  Started reduce_scatter_tensor_coalesced(
      Tensors& outputs, Tensors& inputs, const c10d::ReduceScatterOptions& options) override {
    Started last;
    for (size_t i = 0; i < outputs.size(); ++i)
      (last = _reduce_scatter_base(outputs[i], inputs[i], options))->wait();
    return last;
  }
  Started alltoall_base(
      Tensor& output, Tensor& input, std::vector<int64_t>& to_sizes, std::vector<int64_t>& from_sizes,
      const c10d::AllToAllOptions& options) override {
    auto to = checked(output);
    auto from = checked(input);
    return kept(gloo_->alltoall_base(to, from, to_sizes, from_sizes, options));
  }
  Started send(Tensors& tensors, int rank, int tag) override {
    auto host = hosts(tensors);
    return kept(gloo_->send(host, rank, tag));
  }
  Started recv(Tensors& tensors, int rank, int tag) override {
    auto host = hosts(tensors);
    return kept(gloo_->recv(host, rank, tag));
  }
  Started barrier(const c10d::BarrierOptions& options) override {
    return gloo_->barrier(options);
  }

 private:
  const c10::intrusive_ptr<c10d::Backend> gloo_;
  std::optional<std::vector<Started>> coalesced_;

  static Tensor checked(const Tensor& tensor) {
    TORCH_CHECK(tensor.is_cuda(), "No backend type associated with device type ", tensor.device().type());
    TORCH_CHECK(tensor.is_contiguous(), "Tensors must be contiguous");
    return host_alias(tensor);
  }
  static Tensors hosts(const Tensors& tensors) {
    Tensors made;
    for (const auto& tensor : tensors)
      made.push_back(checked(tensor));
    return made;
  }
  static Lists hosts(const Lists& lists) {
    Lists made;
    for (const auto& tensors : lists)
      made.push_back(hosts(tensors));
    return made;
  }
  Started kept(Started work) {
    if (coalesced_)
      coalesced_->push_back(work);
    return work;
  }
  template <typename Options, typename Start>
  Started reduced(Options options, Tensors& results, Start start) {
    if (options.reduceOp != c10d::ReduceOp::AVG)
      return kept(start(options));
    options.reduceOp = c10d::ReduceOp::SUM;
    auto work = start(options);
    work->wait();
    for (auto& result : results)
      result.div_(size_);
    return work;
  }
};

// DistributedDataParallel wants one for each type of device.
class Timer final : public c10d::Timer {
 public:
  explicit Timer(c10::Device) {}
  std::optional<int64_t> measureDifference(Event start, Event end) override {
    return getTimeRef(end) - getTimeRef(start);
  }
};

} // namespace

namespace c10d {
C10_REGISTER_TYPED_CLASS(TimerRegistry, c10::kCUDA, ::Timer)
} // namespace c10d

PYBIND11_MODULE(TORCH_EXTENSION_NAME, m) {
  m.def("begin", [](int devices, size_t bytes) {
    device_count = static_cast<DeviceIndex>(devices);
    total_bytes = bytes;
    install_hooks();
    c10::SetAllocator(CUDA, &allocator, 1);
  });
  m.def("init", [] { at::globalContext().lazyInitDevice(CUDA); });
  m.def("stream_id", [](int device) { return current_streams[static_cast<DeviceIndex>(device)]; });
  m.def("set_stream", [](int device, int64_t id) { current_streams[static_cast<DeviceIndex>(device)] = id; });
  m.def("synchronize", &synchronize_all);
  m.def("host_register", &host_register);
  m.def("host_unregister", &host_unregister);
  m.def("default_generator", &default_generator);
  m.def("device_count", [] { return static_cast<int>(Guard().deviceCount()); });
  m.def("resize", &resize_storage);
  m.def("was_asked", [] { return was_asked.load(); });
  py::class_<Nccl, c10d::Backend, c10::intrusive_ptr<Nccl>>(m, "ProcessGroupNCCL")
      .def(py::init([](const py::object& store, int rank, int size, const py::object& options) {
        const auto make = py::module_::import("torch.distributed.distributed_c10d").attr("ProcessGroupGloo");
        const auto gloo = make(store, rank, size, options.attr("_timeout"));
        return c10::make_intrusive<Nccl>(gloo.cast<c10::intrusive_ptr<c10d::Backend>>());
      }));
}
