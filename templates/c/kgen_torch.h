/* Operators of PyTorch that call the C functions of a package: tensors, streams, errors and registration.
 *
 * SPDX-License-Identifier: Apache-2.0
 */
#ifndef KGEN_TORCH_H
#define KGEN_TORCH_H

#include <dlfcn.h>
#include <string.h>

#include <initializer_list>
#include <optional>
#include <string>
#include <tuple>
#include <utility>

#include <ATen/Context.h>
#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/zeros_like.h>
#include <ATen/ops/sum.h>
#include <c10/core/Allocator.h>
#include <c10/core/DeviceGuard.h>
#include <c10/core/GradMode.h>
#include <torch/csrc/autograd/custom_function.h>
#include <torch/library.h>

#include "../c/kgen.h"

/* The type of device that kernels run on. Tests without a GPU set another one. */
#ifndef KGEN_DEVICE
#define KGEN_DEVICE c10::DeviceType::CUDA
#endif

namespace kgen {

using at::Tensor;
using torch::autograd::AutogradContext;
using torch::autograd::variable_list;
using Optional = std::optional<Tensor>;

/* --- errors ------------------------------------------------------------------------------------------------------- */

/* Messages are strings: with one build of PyTorch 2.11, a process ended where a stream of C++ printed numbers. */
[[noreturn]] inline void raise_type(const std::string &message)
{
    TORCH_CHECK_TYPE(false, message);
}

[[noreturn]] inline void raise_value(const std::string &message)
{
    TORCH_CHECK_VALUE(false, message);
}

[[noreturn]] inline void raise_runtime(const std::string &message)
{
    TORCH_CHECK(false, message);
}

inline std::string text(at::IntArrayRef sizes)
{
    std::string found;
    for (const int64_t size : sizes) {
        found += (found.empty() ? "" : ", ") + std::to_string(size);
    }
    return "[" + found + "]";
}

/* --- names -------------------------------------------------------------------------------------------------------- */

/* Each package has one library of operators. `python` is the library of its operators in Python, or empty. */
struct Names {
    std::string library, python;
};

inline Names &names()
{
    static Names found;
    return found;
}

inline std::string named(const std::string &library, const std::string &name)
{
    return library + "::" + name;
}

/* Return an operator of the package, with the type of its C++ function. */
template <class Function> auto found(const std::string &function, const char *suffix)
{
    const std::string name = named(names().library, function + suffix);
    return c10::Dispatcher::singleton().findSchemaOrThrow(name.c_str(), "").typed<Function>();
}

/* Return the operator in Python, for a call that no machine code fits. Without it, raise an error: `why`. */
template <class Function>
auto in_python(const std::string &function, const char *suffix, const Tensor &x, const char *why)
{
    if (names().python.empty() && x.device().type() != KGEN_DEVICE) {
        raise_value(function + ": tensors must be on a CUDA device, got " + x.device().str());
    }
    if (names().python.empty()) {
        raise_runtime(*why ? why : function + ": no machine code for these dtypes");
    }
    const std::string name = named(names().python, function + suffix);
    return c10::Dispatcher::singleton().findSchemaOrThrow(name.c_str(), "").typed<Function>();
}

/* Make the library of a package. Copies in one process get numbers, as in Python. The library is never destroyed. */
inline bool made_library(const std::string &code, const char *function, void (*implement)(torch::Library &))
{
    std::string name = code;
    for (int i = 2; c10::Dispatcher::singleton().findSchema({named(name, function), ""}); i++) {
        name = code + "_" + std::to_string(i);
    }
    names().library = name;
    implement(*new torch::Library(torch::Library::FRAGMENT, name, std::nullopt, __FILE__, __LINE__));
    return true;
}

/* Define an operator: its function for all devices, the function that allocates its results, and the one for autograd.
 */
template <class Function>
void define(torch::Library &library, const char *schema, Function *function, Function *meta,
            Function *autograd = nullptr)
{
    const std::string name(schema, strchr(schema, '('));
    library.def(schema, {at::Tag::pt2_compliant_tag});
    library.impl(name.c_str(), torch::dispatch(c10::DispatchKey::CompositeExplicitAutograd, function));
    library.impl(name.c_str(), torch::dispatch(c10::DispatchKey::Meta, meta));
    if (autograd) {
        library.impl(name.c_str(), torch::dispatch(c10::DispatchKey::Autograd, autograd));
    }
}

/* --- the device --------------------------------------------------------------------------------------------------- */

/* Functions of PyTorch and of the driver, which a process with CUDA tensors has loaded. */
struct Loaded {
    int (*stream)(int32_t device, void **stream) = nullptr;
    int (*current)(void **context) = nullptr;
    int (*retain)(void **context, int device) = nullptr;
    int (*set)(void *context) = nullptr;

    Loaded()
    {
        void *torch = dlopen("libtorch_cuda.so", RTLD_NOW | RTLD_NOLOAD), *driver = dlopen("libcuda.so.1", RTLD_NOW);
        if (!torch || !driver) {
            raise_runtime("there is no CUDA driver, or PyTorch has no CUDA");
        }
        stream = reinterpret_cast<decltype(stream)>(dlsym(torch, "aoti_torch_get_current_cuda_stream"));
        current = reinterpret_cast<decltype(current)>(dlsym(driver, "cuCtxGetCurrent"));
        retain = reinterpret_cast<decltype(retain)>(dlsym(driver, "cuDevicePrimaryCtxRetain"));
        set = reinterpret_cast<decltype(set)>(dlsym(driver, "cuCtxSetCurrent"));
        if (!stream || !current || !retain || !set) {
            raise_runtime("PyTorch or the CUDA driver is too old");
        }
    }
};

/* The device, context and stream of a call. Threads of autograd may begin without a context. */
class Place
{
  public:
    explicit Place(const Tensor &x) : device(x.device()), guard_(device)
    {
        if (device.type() != c10::DeviceType::CUDA) {
            return;
        }
        static const Loaded loaded;
        void *context = nullptr, *found = nullptr;
        int error = loaded.current(&context);
        if (!error && !context) {
            error = loaded.retain(&context, device.index());
            error = error ? error : loaded.set(context);
        }
        if (error) {
            raise_runtime("CUDA driver: no context on " + device.str() + " (" + std::to_string(error) + ")");
        }
        if (loaded.stream(device.index(), &found)) {
            raise_runtime("PyTorch returned no stream on " + device.str());
        }
        stream = static_cast<CUstream>(found);
    }

    c10::Device device;
    CUstream stream = nullptr;

  private:
    c10::DeviceGuard guard_;
};

/* --- tensors ------------------------------------------------------------------------------------------------------ */

/* True if the kernels of the package can read x: it is on a GPU, and has a dtype with machine code. */
inline bool served(const Tensor &x)
{
    return x.device().type() == KGEN_DEVICE;
}

/* Return a tensor for the C functions, which check sizes and strides. A number is a tensor of one element. */
inline kgen_tensor in_c(const Tensor &x)
{
    kgen_tensor found = {};
    found.data = x.data_ptr();
    found.sizes[0] = found.strides[0] = 1;
    const at::IntArrayRef sizes = x.sizes(), strides = x.strides();
    for (size_t i = 0; i < sizes.size(); i++) {
        found.sizes[i] = sizes[i];
        found.strides[i] = strides[i];
    }
    return found;
}

/* Return an argument for the C functions. Raise errors for the properties that C does not know. */
inline kgen_tensor taken(const char *function, const char *label, const Tensor &x, int64_t rank, at::ScalarType dtype,
                         const c10::Device &device)
{
    const bool dense = x.layout() == at::kStrided && !x.is_nested();
    if (dense && x.scalar_type() == dtype && x.dim() == rank && x.device() == device) {
        return in_c(x);
    }
    const std::string name = std::string(function) + ": " + label;
    if (!dense) {
        raise_type(name + " must be a dense tensor");
    }
    if (x.scalar_type() != dtype) {
        raise_type(name + " must be " + c10::toString(dtype) + ", got " + c10::toString(x.scalar_type()));
    }
    if (x.dim() != rank) {
        raise_value(name + " must have " + std::to_string(rank) + " dimensions, got " + text(x.sizes()));
    }
    raise_value(name + " must be on " + device.str() + ", got " + x.device().str());
}

/* Raise an error unless all tensors are on one device. If one has no data, PyTorch calls no function of a device. */
inline void require_one_device(const char *function, std::initializer_list<const Tensor *> tensors)
{
    for (const Tensor *x : tensors) {
        const c10::Device device = (*tensors.begin())->device();
        if (x->device() != device) {
            raise_value(std::string(function) + ": expected tensors on " + device.str() + ", got " + x->device().str());
        }
    }
}

/* Return a positive number: 0 means the default in C. */
inline double positive(const char *function, const char *label, double x)
{
    if (!(x > 0.0)) {
        raise_value(std::string(function) + ": " + label + " must be positive, got " + std::to_string(x));
    }
    return x;
}

/* True if TMA can load tiles of x: contiguous rows at multiples of 16 bytes. */
inline bool by_tma(const Tensor &x)
{
    const int64_t last = x.dim() - 1, bytes = x.element_size();
    bool fits = x.stride(last) == 1 && reinterpret_cast<uintptr_t>(x.data_ptr()) % 16 == 0 && x.numel() > 0;
    for (int64_t i = 0; i < last; i++) {
        fits = fits && x.stride(i) > 0 && x.stride(i) * bytes % 16 == 0;
    }
    return fits;
}

/* Return x, or a copy that TMA can load. The gradient of a sum has strides of 0. */
inline Tensor loadable(const Tensor &x)
{
    return by_tma(x) ? x : x.clone(at::MemoryFormat::Contiguous);
}

using Sizes = std::initializer_list<c10::SymInt>;

inline Tensor empty(Sizes sizes, const Tensor &like, at::ScalarType dtype)
{
    return at::empty_symint(c10::SymIntArrayRef(sizes), like.options().dtype(dtype));
}

inline Tensor empty(Sizes sizes, const Tensor &like)
{
    return empty(sizes, like, like.scalar_type());
}

/* Allocate [B, H, S, D] with the memory order of `like`: [B, S, H, D] or [B, H, S, D]. */
inline Tensor empty_as(Sizes sizes, const Tensor &like)
{
    const c10::SymInt *s = sizes.begin();
    if (like.sym_stride(1) < like.sym_stride(2)) {
        return empty({s[0], s[2], s[1], s[3]}, like).transpose(1, 2);
    }
    return empty(sizes, like);
}

/* Allocate a tensor, or one without elements. */
inline Tensor empty_if(bool there, Sizes sizes, const Tensor &like, at::ScalarType dtype)
{
    return there ? empty(sizes, like, dtype) : empty({0}, like, dtype);
}

inline Optional contiguous(const Optional &x)
{
    return x.has_value() ? Optional(x->contiguous()) : x;
}

/* Return x if it has elements. */
inline Optional nonempty(const Optional &x)
{
    return x.has_value() && x->numel() ? x : std::nullopt;
}

/* Return a tensor that may be absent, for the C functions, which do not check the sizes of empty tensors. */
inline kgen_tensor taken_if(const char *function, const char *label, const Optional &x, Sizes sizes,
                            at::ScalarType dtype, const c10::Device &device)
{
    if (!x.has_value()) {
        return {};
    }
    const kgen_tensor found = taken(function, label, *x, static_cast<int64_t>(sizes.size()), dtype, device);
    size_t i = 0;
    for (const c10::SymInt &size : sizes) {
        if (x->size(i++) != size.expect_int()) {
            raise_value(std::string(function) + ": " + label + " has wrong sizes, got " + text(x->sizes()));
        }
    }
    return found;
}

/* Return a contiguous tensor with other sizes for the C functions, or none. */
inline kgen_tensor in_c(const Tensor &x, bool there, Sizes sizes)
{
    kgen_tensor found = {};
    if (there) {
        int64_t step = 1, i = 0;
        found.data = x.data_ptr();
        for (const c10::SymInt &size : sizes) {
            found.sizes[i++] = size.expect_int();
        }
        while (i--) {
            found.strides[i] = step;
            step *= found.sizes[i];
        }
    }
    return found;
}

/* --- calls -------------------------------------------------------------------------------------------------------- */

/* The C functions of a pass. */
template <class Arguments> struct Pass {
    size_t (*workspace)(const Arguments *);
    int (*call)(const Arguments *, void *, size_t, CUstream);
    const char *(*error)();
};

/* Launch a pass. Return false if it has no machine code for the call. Raise errors for invalid arguments. */
template <class Arguments> bool launched(const Pass<Arguments> &pass, const Arguments &arguments, const Place &at)
{
    const size_t bytes = pass.workspace(&arguments);
    c10::DataPtr memory;
    if (bytes != KGEN_NO_SIZE && bytes) {
        memory = c10::GetAllocator(at.device.type())->allocate(bytes);
    }
    const int status = pass.call(&arguments, memory.get(), bytes == KGEN_NO_SIZE ? 0 : bytes, at.stream);
    if (status == KGEN_INVALID) {
        raise_value(pass.error());
    }
    if (status != KGEN_OK && status != KGEN_NO_KERNEL) {
        raise_runtime(pass.error());
    }
    return status == KGEN_OK;
}

/* --- derivatives -------------------------------------------------------------------------------------------------- */

inline bool required(std::initializer_list<const Tensor *> tensors)
{
    bool any = false;
    for (const Tensor *x : tensors) {
        any = any || x->requires_grad();
    }
    return any && c10::GradMode::is_enabled();
}

inline bool required(const Optional &x)
{
    return x.has_value() && x->requires_grad() && c10::GradMode::is_enabled();
}

/* Return a tensor of autograd, which may be undefined. */
inline Optional optional(const Tensor &x)
{
    return x.defined() ? Optional(x) : std::nullopt;
}

inline variable_list defined(const variable_list &tensors)
{
    variable_list found;
    for (const Tensor &x : tensors) {
        if (x.defined()) {
            found.push_back(x);
        }
    }
    return found;
}

template <class Results> variable_list listed(const Results &results)
{
    return std::apply([](const auto &...x) { return variable_list{x...}; }, results);
}

template <class Results, size_t... I> Results in_tuple(const variable_list &results, std::index_sequence<I...>)
{
    return Results(results[I]...);
}

template <class Results> Results in_tuple(const variable_list &results)
{
    return in_tuple<Results>(results, std::make_index_sequence<std::tuple_size_v<Results>>());
}

/* Return the sum over some dimensions. */
inline Tensor summed(const Tensor &x, std::initializer_list<int64_t> over)
{
    return x.sum(at::IntArrayRef(over));
}

/* Gradients without a derivative: without this function, the second derivative would silently be zero. */
struct NoDerivative : public torch::autograd::Function<NoDerivative> {
    static variable_list forward(AutogradContext *context, at::TensorList of, const std::string &name,
                                 variable_list gradients)
    {
        (void)of;
        context->saved_data["name"] = name;
        return gradients;
    }

    static variable_list backward(AutogradContext *context, const variable_list &)
    {
        const std::string name = context->saved_data["name"].toStringRef();
        TORCH_CHECK_NOT_IMPLEMENTED(false, name + ": second derivatives are not supported");
    }
};

/* Compute gradients of tensors and of other gradients `of`. Differentiating them (create_graph) raises. */
template <class Call>
variable_list once(const std::string &name, const variable_list &tensors, const variable_list &of, Call call)
{
    variable_list found;
    {
        const at::AutoGradMode without(false);
        std::apply([&](const auto &...gradient) { found = {gradient...}; }, call());
    }
    if (!c10::GradMode::is_enabled()) {
        return found;
    }
    variable_list all = tensors;
    for (const Tensor &x : of) {
        if (x.defined()) {
            all.push_back(x);
        }
    }
    return NoDerivative::apply(at::TensorList(all), name, std::move(found));
}

} // namespace kgen

#endif
