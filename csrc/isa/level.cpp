// One instruction set level: CMake compiles this file once for each, with TURNSTILE_LEVEL as the name
// of its namespace. It includes no standard library header with inline code, on purpose.
#include "isa/attend.h"
#include "isa/cache.h"
#include "isa/kernels.h"
#include "isa/linear.h"
#include "isa/logits.h"
#include "isa/rows.h"

#define NAME_OF(level) NAME_OF_(level)
#define NAME_OF_(level) #level
#define TABLE_OF(level) TABLE_OF_(level)
#define TABLE_OF_(level) level##_kernels

namespace turnstile {
namespace {
const Kernels table = {
    NAME_OF(TURNSTILE_LEVEL),
    TURNSTILE_LEVEL::linear,
    TURNSTILE_LEVEL::norm,
    TURNSTILE_LEVEL::head,
    TURNSTILE_LEVEL::write,
    TURNSTILE_LEVEL::attend,
    TURNSTILE_LEVEL::attend_scratch_bytes,
    TURNSTILE_LEVEL::argmax,
    TURNSTILE_LEVEL::log_normalizer,
    TURNSTILE_LEVEL::top_k,
};
}  // namespace

const Kernels* TABLE_OF(TURNSTILE_LEVEL)() { return &table; }

}  // namespace turnstile
