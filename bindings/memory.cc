#include <nanobind/ndarray.h>
#include <sys/mman.h>

#include "bind.hpp"

namespace nb = nanobind;
using namespace nb::literals;

namespace uec::python {
namespace {

struct Mapping {
  void* address;
  size_t num_bytes;
};

// Unlike mmap.mmap, keeps no descriptor open: a group maps every region of every peer.
nb::ndarray<nb::numpy, uint8_t> map_shared(int fd, size_t num_bytes) {
  void* const address =
      mmap(nullptr, num_bytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_POPULATE, fd, 0);
  if (address == MAP_FAILED) {
    PyErr_SetFromErrno(PyExc_OSError);
    throw nb::python_error();
  }
  const nb::capsule owner(new Mapping{address, num_bytes}, [](void* p) noexcept {
    const auto* mapping = static_cast<Mapping*>(p);
    munmap(mapping->address, mapping->num_bytes);
    delete mapping;
  });
  return {address, {num_bytes}, owner};
}

// Lets the shared memory at `source` appear at `target` too, in place of other shared memory, which
// is freed. Whole pages.
void map_again(uint64_t target, uint64_t source, size_t num_bytes) {
  auto* const to = reinterpret_cast<void*>(target);
  // With a size of 0, mremap() leaves a shared mapping where it is, and makes another one of it.
  if (madvise(to, num_bytes, MADV_REMOVE) != 0 ||
      mremap(reinterpret_cast<void*>(source), 0, num_bytes, MREMAP_MAYMOVE | MREMAP_FIXED, to) ==
          MAP_FAILED) {
    PyErr_SetFromErrno(PyExc_OSError);
    throw nb::python_error();
  }
}

}  // namespace

void bind_memory(nb::module_& m) {
  m.def("map_shared", &map_shared, "fd"_a, "num_bytes"_a);
  m.def("map_again", &map_again, "target"_a, "source"_a, "num_bytes"_a);
}

}  // namespace uec::python
