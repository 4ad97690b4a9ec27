// A packed weight consists of panels of output features, each read from front to back, a step along in_features at a
// time. What the last panel has too many is zero.
#pragma once

namespace pagedattn {

constexpr int LINEAR_PANEL = 16;  // output features

}  // namespace pagedattn
