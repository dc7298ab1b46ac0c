// What this machine can do at best, to set what a step achieves beside it.
#pragma once

#include "engine/team.h"
#include "isa/kernels.h"

namespace turnstile {

// Operations a second (two for each multiply-add) of products whose operands stay in the first cache.
double peak_operations(Team& team, const Kernels& kernels, Format format);

// Bytes a second of reading memory that no cache holds.
double peak_bandwidth(Team& team, const Kernels& kernels);

}  // namespace turnstile
