// Kernels of a test on the PTX machine instead of the emulated device: if $UEC_PTX_MACHINE names
// its library, and $UEC_PTX the compiled kernels.
#pragma once

#include <dlfcn.h>

#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <thread>

#include "ptx/machine/api.h"
#include "support/fibers.hpp"

namespace ptx_machine {

class Client {
 public:
  // Null: the test runs on the emulated device.
  static const Client* instance() {
    static const Client* const client =
        std::getenv("UEC_PTX_MACHINE") == nullptr ? nullptr : new Client;
    return client;
  }

  // Until the grid has ended. Others' launches go on meanwhile.
  void run(const PtxLaunch& launch) const {
    void* const grid = begin(&launch);
    while (advance(grid) == 0) {
      if (Fiber::running() != nullptr)
        Fibers::yield();
      else
        std::this_thread::yield();
    }
  }

  decltype(&ptx_begin) begin;
  decltype(&ptx_advance) advance;
  decltype(&ptx_memory) memory;
  decltype(&ptx_results) results;
  decltype(&ptx_symmetric) symmetric;
  decltype(&ptx_forget) forget;
  decltype(&ptx_report) report;

 private:
  Client() : library_(dlopen(std::getenv("UEC_PTX_MACHINE"), RTLD_NOW)) {
    if (library_ == nullptr) fail();
    find("ptx_begin", &begin);
    find("ptx_advance", &advance);
    find("ptx_memory", &memory);
    find("ptx_results", &results);
    find("ptx_symmetric", &symmetric);
    find("ptx_forget", &forget);
    find("ptx_report", &report);
  }
  template <class F>
  void find(const char* name, F* function) {
    *function = reinterpret_cast<F>(dlsym(library_, name));
    if (*function == nullptr) fail();
  }
  [[noreturn]] static void fail() {
    std::fprintf(stderr, "%s\n", dlerror());
    std::exit(2);
  }

  void* library_;
};

}  // namespace ptx_machine
