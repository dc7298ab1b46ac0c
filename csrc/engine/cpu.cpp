#include "engine/cpu.h"

#include <stdexcept>

#if defined(__linux__) && defined(TURNSTILE_TILES)
#include <sys/syscall.h>
#include <unistd.h>
#endif

namespace turnstile {

namespace {

#if defined(TURNSTILE_TILES)
// Tiles are 8 KiB of state a thread: Linux gives them to a process that asks (arch_prctl(2)).
bool tiles_granted() {
#if defined(__linux__)
  constexpr int kRequestPermission = 0x1023, kTileData = 18;  // ARCH_REQ_XCOMP_PERM
  static const bool granted = syscall(SYS_arch_prctl, kRequestPermission, kTileData) == 0;
  return granted;
#else
  return false;
#endif
}
#endif

struct Level {
  const char* name;
  bool runs;
  const Kernels* (*kernels)();
};

std::vector<Level> levels() {
  std::vector<Level> all;
#if defined(TURNSTILE_X86)
  // The compiler's check includes whether the operating system saves the wide registers.
  __builtin_cpu_init();
  const bool avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
  const bool wide = avx2 && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                    __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl") &&
                    __builtin_cpu_supports("avx512vnni");
#if defined(TURNSTILE_TILES)
  const bool tiles = wide && __builtin_cpu_supports("avx512bf16") && __builtin_cpu_supports("amx-tile") &&
                     __builtin_cpu_supports("amx-int8") && __builtin_cpu_supports("amx-bf16");
  all.push_back({"amx", tiles && tiles_granted(), amx_kernels});
#endif
  all.push_back({"avx512", wide && __builtin_cpu_supports("avx512bf16"), avx512_kernels});
  all.push_back({"avx512vnni", wide, avx512vnni_kernels});
  all.push_back({"avx2", avx2, avx2_kernels});
#endif
  all.push_back({"portable", true, portable_kernels});
  return all;
}

}  // namespace

std::vector<std::string> available_levels() {
  std::vector<std::string> names;
  for (const Level& level : levels())
    if (level.runs) names.emplace_back(level.name);
  return names;
}

const Kernels& kernels_of(const std::string& name) {
  std::string known;
  for (const Level& level : levels()) {
    if (level.runs && name == level.name) return *level.kernels();
    if (level.runs) known += std::string(known.empty() ? "" : ", ") + level.name;
  }
  throw std::invalid_argument("this processor cannot run instruction set level '" + name +
                              "'; choose one of: " + known);
}

}  // namespace turnstile
