// shared_group.h where there is no Linux, whose memfd_create, futex and /proc the groups need: no group can be made.
#include <stdexcept>

#include "collectives/shared_group.h"

namespace pagedattn {
namespace {

[[noreturn]] void refuse() { throw std::runtime_error("SharedMemoryGroup: expected Linux, got another system"); }

}  // namespace

int SharedGroup::create(int64_t, int64_t, double) { refuse(); }
std::shared_ptr<SharedGroup> SharedGroup::join(int, int64_t) { refuse(); }
std::shared_ptr<SharedGroup> SharedGroup::find(int64_t) { return nullptr; }

// Of a group, which there is none of.
SharedGroup::~SharedGroup() = default;
void SharedGroup::close() {}
void SharedGroup::abort(const std::string&) {}
std::string SharedGroup::broken() const { return {}; }
char* SharedGroup::buffer(int64_t) const { return nullptr; }
void SharedGroup::meet(SharedCall, DType, int64_t, int64_t) {}
void SharedGroup::throw_if_broken() const {}

}  // namespace pagedattn
