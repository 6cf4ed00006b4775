// Traces: functions of tensors as `trace.py` has recorded them, and how they are run again.
//
// The driver of CUDA and the current stream are found by name in libraries that are loaded already: neither CUDA's
// headers nor its compiler are needed.

#pragma once

#include <Python.h>
#include <dlfcn.h>

#include <ATen/Functions.h>
#include <c10/core/DeviceGuard.h>
#include <c10/core/SafePyObject.h>
#include <torch/csrc/Dtype.h>
#include <torch/csrc/Exceptions.h>
#include <torch/csrc/PyInterpreter.h>
#include <torch/csrc/autograd/python_variable.h>
#include <torch/csrc/autograd/variable.h>

#include <algorithm>
#include <array>
#include <cstring>
#include <memory>
#include <utility>
#include <vector>

namespace {

using at::Tensor;
using torch::autograd::variable_list;

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
  // ("launch", kernel or callable, grid, threads, shared memory, parameters: a number, or the slot and bytes of a pointer)
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

}  // namespace
