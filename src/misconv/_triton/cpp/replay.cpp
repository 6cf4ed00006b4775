// Replays what Python has recorded: tensors that are made, kernels that are launched, and gradients of it all.
//
// A small layer is over before Python has launched its kernels. For tensors of the same sizes, strides and types the
// same tensors are made and the same kernels launched every time, so `trace.py` writes both down once, as a list of
// steps, and from then on they are taken here. Results are those of the recorded functions, bit for bit.

#include "trace.h"

#include <ATen/autocast_mode.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <torch/csrc/autograd/custom_function.h>

#include <mutex>
#include <optional>

namespace {

constexpr size_t kMost = 12;  // inputs of a function

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
