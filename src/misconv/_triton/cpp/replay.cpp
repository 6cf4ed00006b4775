// Replays what Python has recorded: tensors that are made, kernels that are launched, and gradients of it all.
//
// A small layer is over before Python has launched its kernels. For tensors of the same sizes, strides and types the
// same tensors are made and the same kernels launched every time, so `trace.py` writes both down once, as a list of
// steps, and from then on they are taken here. Results are those of the recorded functions, bit for bit.
//
// The driver of CUDA and the current stream are found by name in libraries that are loaded already: neither CUDA's
// headers nor its compiler are needed.

#include <Python.h>
#include <dlfcn.h>

#include <ATen/Functions.h>
#include <ATen/autocast_mode.h>
#include <c10/core/DeviceGuard.h>
#include <c10/core/SafePyObject.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <torch/csrc/Dtype.h>
#include <torch/csrc/Exceptions.h>
#include <torch/csrc/PyInterpreter.h>
#include <torch/csrc/autograd/custom_function.h>
#include <torch/csrc/autograd/python_variable.h>

#include <algorithm>
#include <array>
#include <cstring>
#include <memory>
#include <mutex>
#include <optional>
#include <utility>
#include <vector>

namespace {

using at::Tensor;
using torch::autograd::variable_list;

constexpr size_t kMost = 12;  // inputs of a function
constexpr uintptr_t kAligned = 16;  // bytes: kernels were compiled for such addresses

// Python ------------------------------------------------------------------------------------------------------------

// The error of Python that is set, kept for the thread that will hear of it: gradients have one of their own.
[[noreturn]] void throw_error() {
  python_error error;
  error.persist();
  throw error;
}

struct Reference {  // to an object of Python, which is given back
  PyObject* object;
  explicit Reference(PyObject* o) : object(o) {
    if (o == nullptr) throw_error();
  }
  Reference(const Reference&) = delete;
  Reference& operator=(const Reference&) = delete;
  ~Reference() { Py_DECREF(object); }
  PyObject* release() { return std::exchange(object, Py_NewRef(Py_None)); }
};

int64_t integer(PyObject* o) {
  const int64_t value = PyLong_AsLongLong(o);
  if (value == -1 && PyErr_Occurred()) throw_error();
  return value;
}

PyObject* item(PyObject* tuple, Py_ssize_t i) {
  PyObject* found = PyTuple_GetItem(tuple, i);
  if (found == nullptr) throw_error();
  return found;
}

std::vector<int64_t> integers(PyObject* tuple) {
  std::vector<int64_t> found;
  for (Py_ssize_t i = 0; i < PyTuple_Size(tuple); ++i) found.push_back(integer(item(tuple, i)));
  return found;
}

Tensor tensor(PyObject* o) {
  if (o == Py_None) return {};
  TORCH_CHECK(THPVariable_Check(o), "expected a tensor or None");
  return THPVariable_Unpack(o);
}

variable_list tensors(PyObject* tuple) {
  variable_list found;
  for (Py_ssize_t i = 0; i < PyTuple_Size(tuple); ++i) found.push_back(tensor(item(tuple, i)));
  return found;
}

PyObject* wrap(const Tensor& t) { return t.defined() ? THPVariable_Wrap(t) : Py_NewRef(Py_None); }

PyObject* wrap(const variable_list& list) {
  Reference tuple(PyTuple_New(static_cast<Py_ssize_t>(list.size())));
  for (size_t i = 0; i < list.size(); ++i) PyTuple_SetItem(tuple.object, static_cast<Py_ssize_t>(i), wrap(list[i]));
  return tuple.release();
}

// CUDA ----------------------------------------------------------------------------------------------------------------

using LaunchKernel = int (*)(void*, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, void*, void**,
                             void**);
using CurrentStream = int32_t (*)(int32_t, void**);

template <typename T>
T symbol(const char* library, const char* name) {
  void* handle = dlopen(library, RTLD_LAZY | RTLD_NOLOAD);
  void* found = handle == nullptr ? nullptr : dlsym(handle, name);
  TORCH_CHECK(found != nullptr, "no ", name, " in ", library);
  return reinterpret_cast<T>(found);
}

void* stream_of(c10::Device device) {
  static const auto current = symbol<CurrentStream>("libtorch_cuda.so", "aoti_torch_get_current_cuda_stream");
  void* stream = nullptr;
  TORCH_CHECK(current(device.index(), &stream) == 0, "the current stream cannot be found");
  return stream;
}

// Traces --------------------------------------------------------------------------------------------------------------

struct View {  // of the tensor in a slot
  int64_t slot = -1;  // -1: there is none
  std::vector<int64_t> sizes, strides;
  int64_t offset = 0;  // in numbers, from the begin of that tensor

  Tensor of(const variable_list& slots) const {
    if (slot < 0) return {};
    const Tensor& whole = slots[slot];
    if (offset == 0 && whole.sizes() == sizes && whole.strides() == strides) return whole;
    return at::as_strided(whole, sizes, strides, whole.storage_offset() + offset);
  }
};

View view(PyObject* o) {
  if (o == Py_None) return {};
  return {integer(item(o, 0)), integers(item(o, 1)), integers(item(o, 2)), integer(item(o, 3))};
}

struct Pointer {
  int64_t slot, bytes;
};

struct Step {
  enum Kind { kEmpty, kZero, kFree, kSum, kCopy, kLaunch } kind;
  int64_t slot = -1;  // what is made, written or freed
  std::vector<int64_t> sizes, strides;
  at::ScalarType dtype = at::kFloat;
  View source;
  // Of a launch: a kernel, or on a computer without a GPU a callable that stands for one.
  void* kernel = nullptr;
  std::shared_ptr<c10::SafePyObject> stand_in;
  std::array<unsigned, 3> grid{};
  unsigned threads = 0, shared = 0;
  std::vector<Pointer> pointers;
  std::vector<uint64_t> numbers;  // the parameters; of a pointer where it stands in `pointers`
  std::vector<bool> is_pointer;

  void launch(const variable_list& slots, c10::Device device) const {
    if (grid[0] == 0 || grid[1] == 0 || grid[2] == 0) return;
    std::vector<uint64_t> values(numbers);
    std::vector<void*> parameters(numbers.size());
    for (size_t i = 0; i < numbers.size(); ++i) {
      if (is_pointer[i]) {
        const Pointer& p = pointers[numbers[i]];
        values[i] = reinterpret_cast<uintptr_t>(slots[p.slot].data_ptr()) + p.bytes;
      }
      parameters[i] = &values[i];
    }
    if (stand_in != nullptr) return call_stand_in(values);
    static const auto start = symbol<LaunchKernel>("libcuda.so.1", "cuLaunchKernel");
    const int error = start(kernel, grid[0], grid[1], grid[2], threads, 1, 1, shared, stream_of(device),
                            parameters.data(), nullptr);
    TORCH_CHECK(error == 0, "a kernel could not be launched: error ", error, " of CUDA's driver");
  }

  void call_stand_in(const std::vector<uint64_t>& values) const {
    pybind11::gil_scoped_acquire lock;
    Reference arguments(PyTuple_New(static_cast<Py_ssize_t>(values.size())));
    for (size_t i = 0; i < values.size(); ++i) {
      PyTuple_SetItem(arguments.object, static_cast<Py_ssize_t>(i), PyLong_FromUnsignedLongLong(values[i]));
    }
    Reference result(PyObject_Call(stand_in->ptr(getPyInterpreter()), arguments.object, nullptr));
  }
};

Step make_step(PyObject* o) {
  static const std::array<const char*, 6> names{"empty", "zero", "free", "sum", "copy", "launch"};
  const char* name = PyUnicode_AsUTF8(item(o, 0));
  if (name == nullptr) throw_error();
  Step step;
  size_t kind = 0;
  while (kind < names.size() && std::strcmp(names[kind], name) != 0) ++kind;
  TORCH_CHECK(kind < names.size(), "unknown step ", name);
  step.kind = static_cast<Step::Kind>(kind);
  if (step.kind != Step::kLaunch) {
    step.slot = integer(item(o, 1));
    if (step.kind == Step::kEmpty) {
      step.sizes = integers(item(o, 2));
      step.strides = integers(item(o, 3));
      step.dtype = reinterpret_cast<THPDtype*>(item(o, 4))->scalar_type;
    } else if (step.kind == Step::kSum || step.kind == Step::kCopy) {
      step.source = view(item(o, 2));
    }
    return step;
  }
  // ("launch", kernel or callable, grid, threads, shared memory, ((is a pointer, number, or slot and bytes), …))
  PyObject* kernel = item(o, 1);
  if (PyLong_Check(kernel)) {
    step.kernel = reinterpret_cast<void*>(PyLong_AsUnsignedLongLong(kernel));
  } else {
    step.stand_in = std::make_shared<c10::SafePyObject>(Py_NewRef(kernel), getPyInterpreter());
  }
  const auto grid = integers(item(o, 2));
  for (size_t i = 0; i < 3; ++i) step.grid[i] = static_cast<unsigned>(grid.at(i));
  step.threads = static_cast<unsigned>(integer(item(o, 3)));
  step.shared = static_cast<unsigned>(integer(item(o, 4)));
  PyObject* parameters = item(o, 5);
  for (Py_ssize_t i = 0; i < PyTuple_Size(parameters); ++i) {
    PyObject* each = item(parameters, i);
    if (PyLong_Check(each)) {
      step.numbers.push_back(PyLong_AsUnsignedLongLong(each));
      step.is_pointer.push_back(false);
    } else {
      step.numbers.push_back(step.pointers.size());
      step.is_pointer.push_back(true);
      step.pointers.push_back({integer(item(each, 0)), integer(item(each, 1))});
    }
  }
  if (PyErr_Occurred()) throw_error();
  return step;
}

struct Trace {  // a function of tensors, as the steps that it takes
  std::vector<Step> steps;
  std::vector<View> outputs;
  variable_list constants;  // in the slots behind the inputs
  size_t slots = 0;

  variable_list run(const variable_list& inputs) const {
    const auto first = std::find_if(inputs.begin(), inputs.end(), [](const Tensor& t) { return t.defined(); });
    const c10::Device device = first->device();
    const c10::OptionalDeviceGuard guard(device);
    variable_list values;
    values.reserve(slots);
    values.insert(values.end(), inputs.begin(), inputs.end());
    values.insert(values.end(), constants.begin(), constants.end());
    values.resize(slots);
    for (const Step& step : steps) {
      switch (step.kind) {
        case Step::kEmpty:
          values[step.slot] = at::empty_strided(step.sizes, step.strides, at::device(device).dtype(step.dtype));
          break;
        case Step::kZero:
          values[step.slot].zero_();
          break;
        case Step::kFree:
          values[step.slot].reset();
          break;
        case Step::kSum:
          at::sum_out(values[step.slot], step.source.of(values), {0}, false, values[step.slot].scalar_type());
          break;
        case Step::kCopy:
          values[step.slot].copy_(step.source.of(values));
          break;
        case Step::kLaunch:
          step.launch(values, device);
          break;
      }
    }
    variable_list made;
    made.reserve(outputs.size());
    for (size_t i = 0; i < outputs.size(); ++i) {
      size_t same = 0;  // what is returned twice is one tensor
      while (same < i && (outputs[same].slot != outputs[i].slot || outputs[same].offset != outputs[i].offset ||
                          outputs[same].sizes != outputs[i].sizes || outputs[same].strides != outputs[i].strides)) {
        ++same;
      }
      made.push_back(same < i ? made[same] : outputs[i].of(values));
    }
    return made;
  }
};

Trace make_trace(PyObject* o) {  // (steps, outputs, constants, number of slots)
  Trace trace;
  PyObject* steps = item(o, 0);
  for (Py_ssize_t i = 0; i < PyTuple_Size(steps); ++i) trace.steps.push_back(make_step(item(steps, i)));
  PyObject* outputs = item(o, 1);
  for (Py_ssize_t i = 0; i < PyTuple_Size(outputs); ++i) trace.outputs.push_back(view(item(outputs, i)));
  trace.constants = tensors(item(o, 2));
  trace.slots = static_cast<size_t>(integer(item(o, 3)));
  return trace;
}

struct Guard {  // the tensors for which a trace was made
  struct Known {
    bool defined = false;
    std::vector<int64_t> sizes, strides;
    at::ScalarType dtype = at::kFloat;
    c10::Device device = at::kCPU;
  };
  std::vector<Known> known;

  explicit Guard(const variable_list& list) {
    for (const Tensor& t : list) {
      if (t.defined()) {
        known.push_back({true, t.sizes().vec(), t.strides().vec(), t.scalar_type(), t.device()});
      } else {
        known.emplace_back();
      }
    }
  }

  bool fits(const variable_list& list) const {
    if (list.size() != known.size()) return false;
    for (size_t i = 0; i < list.size(); ++i) {
      const Tensor& t = list[i];
      const Known& k = known[i];
      if (t.defined() != k.defined) return false;
      if (!k.defined) continue;
      if (t.scalar_type() != k.dtype || t.device() != k.device || t.sizes() != k.sizes || t.strides() != k.strides ||
          reinterpret_cast<uintptr_t>(t.data_ptr()) % kAligned != 0) {
        return false;
      }
    }
    return true;
  }
};

// Differentiable functions --------------------------------------------------------------------------------------------

struct Backward {
  std::vector<bool> needed;
  Guard grads;
  Trace trace;
};

struct Entry {  // a function for tensors of certain sizes, strides and types
  Guard guard;
  Trace forward;
  std::vector<int64_t> mutated;  // inputs that are written
  std::mutex mutex;
  std::vector<std::shared_ptr<Backward>> backwards;

  Entry(const variable_list& inputs, Trace trace, std::vector<int64_t> written)
      : guard(inputs), forward(std::move(trace)), mutated(std::move(written)) {}

  std::shared_ptr<Backward> find(const std::vector<bool>& needed, const variable_list& grads) {
    const std::lock_guard<std::mutex> lock(mutex);
    for (const auto& each : backwards) {
      if (each->needed == needed && each->grads.fits(grads)) return each;
    }
    return nullptr;
  }
};

struct Replays {  // all that is known of one function
  int64_t results = 1;  // of the outputs; the others are kept for the gradients
  std::vector<std::shared_ptr<Entry>> entries;
};

struct Kept : torch::CustomClassHolder {  // what a node of the graph of gradients keeps
  std::shared_ptr<Entry> entry;
  c10::SafePyObject fallback;
  std::vector<bool> defined;  // of the inputs
  Kept(std::shared_ptr<Entry> e, PyObject* f, const variable_list& inputs)
      : entry(std::move(e)), fallback(Py_NewRef(f), getPyInterpreter()) {
    for (const Tensor& t : inputs) defined.push_back(t.defined());
  }
};

// Recorded functions are run as they are, without a look at who wants gradients or mixed precision.
struct AsRecorded {
  at::AutoDispatchBelowADInplaceOrView below;
  c10::impl::ExcludeDispatchKeyGuard exact{c10::autocast_dispatch_keyset};
};

variable_list run_forward(const Entry& entry, const variable_list& inputs) {
  variable_list made;
  {
    const AsRecorded guard;
    made = entry.forward.run(inputs);
  }
  for (const int64_t i : entry.mutated) {
    if (inputs[i].defined() && !inputs[i].is_inference()) inputs[i].unsafeGetTensorImpl()->bump_version();
  }
  return made;
}

using Input = std::optional<Tensor>;

struct Replayed : torch::autograd::Function<Replayed> {
  static variable_list forward(torch::autograd::AutogradContext* context, const Replays* replays,
                               const c10::intrusive_ptr<Kept>* kept, const Input& a, const Input& b, const Input& c,
                               const Input& d, const Input& e, const Input& f, const Input& g, const Input& h,
                               const Input& i, const Input& j, const Input& k, const Input& l) {
    variable_list inputs;
    const std::array<const Input*, kMost> all{&a, &b, &c, &d, &e, &f, &g, &h, &i, &j, &k, &l};
    const Entry& entry = *(*kept)->entry;
    for (size_t n = 0; n < (*kept)->defined.size(); ++n) inputs.push_back(all[n]->value_or(Tensor()));
    variable_list made = run_forward(entry, inputs);
    variable_list saved(inputs);
    for (const int64_t n : entry.mutated) saved[n] = Tensor();  // the next batch changes it again
    saved.insert(saved.end(), made.begin() + replays->results, made.end());
    context->save_for_backward(std::move(saved));
    context->saved_data["kept"] = c10::IValue::make_capsule(*kept);
    context->set_materialize_grads(false);
    made.resize(replays->results);
    return made;
  }

  static variable_list backward(torch::autograd::AutogradContext* context, const variable_list& grads) {
    const auto kept = c10::static_intrusive_pointer_cast<Kept>(context->saved_data["kept"].toCapsule());
    const size_t number = kept->defined.size();
    variable_list saved = context->get_saved_variables();
    std::vector<bool> needed(number);
    size_t edge = 0;  // tensors alone have one
    for (size_t i = 0; i < number; ++i) {
      if (kept->defined[i]) needed[i] = context->needs_input_grad(edge++);
    }
    variable_list found;
    std::shared_ptr<Backward> known;
    variable_list inputs(grads);
    inputs.insert(inputs.end(), saved.begin(), saved.end());
    if (!at::GradMode::is_enabled()) known = kept->entry->find(needed, grads);
    if (known != nullptr) {
      const AsRecorded guard;
      found = known->trace.run(inputs);
    } else {
      found = ask(*kept, needed, grads, saved);
    }
    found.insert(found.begin(), 2, Tensor());  // of what is no tensor
    found.resize(2 + kMost);
    return found;
  }

  // What is not known, or shall be differentiated again, is left to Python.
  static variable_list ask(const Kept& kept, const std::vector<bool>& needed, const variable_list& grads,
                           const variable_list& saved) {
    pybind11::gil_scoped_acquire lock;
    auto* owned = new std::shared_ptr<Entry>(kept.entry);
    Reference entry(PyCapsule_New(owned, "misconv.entry", [](PyObject* capsule) {
      delete static_cast<std::shared_ptr<Entry>*>(PyCapsule_GetPointer(capsule, "misconv.entry"));
    }));
    Reference asked(PyTuple_New(static_cast<Py_ssize_t>(needed.size())));
    for (size_t i = 0; i < needed.size(); ++i) {
      PyTuple_SetItem(asked.object, static_cast<Py_ssize_t>(i), PyBool_FromLong(needed[i]));
    }
    Reference given(wrap(grads)), known(wrap(saved));
    Reference answer(PyObject_CallFunctionObjArgs(kept.fallback.ptr(getPyInterpreter()), entry.object, asked.object,
                                                  given.object, known.object, nullptr));
    TORCH_CHECK(PyTuple_Check(answer.object), "gradients must come in a tuple");
    return tensors(answer.object);
  }
};

// The module ----------------------------------------------------------------------------------------------------------

template <typename T>
T* unpack(PyObject* capsule, const char* name) {
  auto* found = static_cast<T*>(PyCapsule_GetPointer(capsule, name));
  if (found == nullptr) throw_error();
  return found;
}

PyObject* new_replays(PyObject*, PyObject* results) {
  HANDLE_TH_ERRORS
  auto made = std::make_unique<Replays>();
  made->results = integer(results);
  return PyCapsule_New(made.release(), "misconv.replays", [](PyObject* capsule) {
    delete static_cast<Replays*>(PyCapsule_GetPointer(capsule, "misconv.replays"));
  });
  END_HANDLE_TH_ERRORS
}

// (replays, inputs, trace, inputs that are written)
PyObject* add(PyObject*, PyObject* const* arguments, Py_ssize_t number) {
  HANDLE_TH_ERRORS
  TORCH_CHECK(number == 4, "add takes 4 arguments");
  const variable_list inputs = tensors(arguments[1]);
  TORCH_CHECK(inputs.size() <= kMost, "at most ", kMost, " inputs");
  unpack<Replays>(arguments[0], "misconv.replays")
      ->entries.push_back(std::make_shared<Entry>(inputs, make_trace(arguments[2]), integers(arguments[3])));
  Py_RETURN_NONE;
  END_HANDLE_TH_ERRORS
}

// (entry, needed, gradients of the results, trace)
PyObject* add_backward(PyObject*, PyObject* const* arguments, Py_ssize_t number) {
  HANDLE_TH_ERRORS
  TORCH_CHECK(number == 4, "add_backward takes 4 arguments");
  auto& entry = *unpack<std::shared_ptr<Entry>>(arguments[0], "misconv.entry");
  std::vector<bool> needed;
  for (const int64_t each : integers(arguments[1])) needed.push_back(each != 0);
  auto made =
      std::make_shared<Backward>(Backward{needed, Guard(tensors(arguments[2])), make_trace(arguments[3])});
  const std::lock_guard<std::mutex> lock(entry->mutex);
  entry->backwards.push_back(std::move(made));
  Py_RETURN_NONE;
  END_HANDLE_TH_ERRORS
}

// (replays, fallback, *inputs) -> the result, or a tuple of several; None for tensors that are not known
PyObject* call(PyObject*, PyObject* const* arguments, Py_ssize_t number) {
  HANDLE_TH_ERRORS
  const Replays& replays = *unpack<Replays>(arguments[0], "misconv.replays");
  const auto count = static_cast<size_t>(number - 2);
  variable_list inputs;
  inputs.reserve(count);
  bool differentiable = false;
  for (size_t i = 0; i < count; ++i) {
    inputs.push_back(tensor(arguments[i + 2]));
    differentiable = differentiable || (inputs[i].defined() && inputs[i].requires_grad());
  }
  std::shared_ptr<Entry> entry;
  for (const auto& each : replays.entries) {
    if (each->guard.fits(inputs)) {
      entry = each;
      break;
    }
  }
  if (entry == nullptr) Py_RETURN_NONE;
  variable_list made;
  if (differentiable && at::GradMode::is_enabled()) {
    const auto kept = c10::make_intrusive<Kept>(entry, arguments[1], inputs);
    std::array<Input, kMost> all;
    for (size_t i = 0; i < count; ++i) {
      if (inputs[i].defined()) all[i] = inputs[i];
    }
    pybind11::gil_scoped_release unlocked;
    made = Replayed::apply(&replays, &kept, all[0], all[1], all[2], all[3], all[4], all[5], all[6], all[7], all[8],
                           all[9], all[10], all[11]);
  } else {
    pybind11::gil_scoped_release unlocked;
    made = run_forward(*entry, inputs);
    made.resize(replays.results);
  }
  return replays.results == 1 ? wrap(made[0]) : wrap(made);
  END_HANDLE_TH_ERRORS
}

PyMethodDef methods[] = {
    {"new_replays", new_replays, METH_O, nullptr},
    {"add", reinterpret_cast<PyCFunction>(reinterpret_cast<void (*)()>(add)), METH_FASTCALL, nullptr},
    {"add_backward", reinterpret_cast<PyCFunction>(reinterpret_cast<void (*)()>(add_backward)), METH_FASTCALL, nullptr},
    {"call", reinterpret_cast<PyCFunction>(reinterpret_cast<void (*)()>(call)), METH_FASTCALL, nullptr},
    {nullptr, nullptr, 0, nullptr},
};
PyModuleDef definition = {PyModuleDef_HEAD_INIT, "misconv_replay", nullptr, -1, methods, nullptr, nullptr, nullptr,
                          nullptr};

}  // namespace

extern "C" __attribute__((visibility("default"))) PyObject* PyInit_misconv_replay() {
  return PyModule_Create(&definition);
}
