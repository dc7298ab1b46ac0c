// Which instruction set levels this processor can run, and the kernels of one of them.
#pragma once

#include <string>
#include <vector>

#include "isa/kernels.h"

namespace turnstile {

// Best first; "portable" is always there.
std::vector<std::string> available_levels();

// Throws std::invalid_argument, naming the available ones, if this machine cannot run `level`.
const Kernels& kernels_of(const std::string& level);

}  // namespace turnstile
