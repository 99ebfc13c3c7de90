// A call prepared by a warp of the emulated device is the call of the host.
#include "cuda/device/warp.cuh"
#include "support/check.hpp"
#include "support/plans.hpp"
#include "support/prepare_cases.hpp"
#include "support/watchdog.hpp"

int main() {
  const Watchdog watchdog("lanes that do not meet");
  using uec::cuda::Warp;
  check_prepared(200, 24, [](const auto& compare) {
    compare([](const PrepareCase& c, Given& given) {
      std::vector<PrepareAnswer> answers(Warp::size());
      emulation::launch({.warps = 1}, [&](std::byte*) {
        answers[Warp::index()] = prepare_call(Warp{}, c, given);
      });
      return answers;
    });
  });
}
