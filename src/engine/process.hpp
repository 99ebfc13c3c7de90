// What a forked child inherits: the memory of its parent as it was, and none of its threads.
#pragma once

#include <unistd.h>

namespace uec {

// Remembers the process that made it.
class Process {
 public:
  bool is_this() const { return getpid() == id_; }

 private:
  pid_t id_ = getpid();
};

// A member that a forked child does not destroy: that would join threads that do not exist there,
// and a condition variable's destructor waits until no thread sleeps on it.
template <class T>
class OwnedByProcess {
 public:
  OwnedByProcess() : object_(new T) {}
  ~OwnedByProcess() {
    if (maker_.is_this()) delete object_;
  }
  OwnedByProcess(const OwnedByProcess&) = delete;
  OwnedByProcess& operator=(const OwnedByProcess&) = delete;

  bool is_inherited() const { return !maker_.is_this(); }
  T& operator*() const { return *object_; }
  T* operator->() const { return object_; }

 private:
  Process maker_;
  T* object_;
};

}  // namespace uec
