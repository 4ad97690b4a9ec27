// What the headers of a new compiler refer to and the libraries of manylinux_2_28 lack (glibc 2.28, GLIBCXX_3.4.24), so
// that the binary runs where these are. All of it is local to the binary (exports.map), as it is with Red Hat's
// compilers, which have a libstdc++_nonshared.a for this.
#include <istream>
#include <locale>
#include <new>
#include <ostream>
#include <string>
// Of <sstream> alone the templates are compiled here: other streams know the facets of a locale by objects in
// libstdc++.
#undef _GLIBCXX_EXTERN_TEMPLATE
#define _GLIBCXX_EXTERN_TEMPLATE 0
#include <sstream>

extern "C" {
extern char __libc_single_threaded;  // of glibc 2.32. 0: counts of references are atomic.
char __libc_single_threaded = 0;
}

namespace std {

void __throw_bad_array_new_length() { throw bad_array_new_length(); }  // of GLIBCXX_3.4.29
template class basic_stringbuf<char>;                                  // with members of 3.4.26 and 3.4.29
template class basic_ostringstream<char>;
template class basic_stringstream<char>;

}  // namespace std

#if defined(PAGEDATTN_WITH_CUDA) && defined(__x86_64__)
// The static CUDA runtime calls functions of libdl, libpthread and librt. Linked against glibc 2.34 or later, where
// they lie in libc, they would be asked for under that version. So a call goes by a symbol of this binary to the old
// version, which each glibc has.
// clang-format off
#define OLD_VERSION(name, version)                                      \
  asm(".pushsection .text\n"                                            \
      ".symver old_" #name "," #name "@" version "\n"                   \
      ".globl " #name "\n"                                              \
      ".type " #name ",@function\n"                                     \
      #name ": jmp *old_" #name "@GOTPCREL(%rip)\n"                     \
      ".popsection");
#define OLD(name) OLD_VERSION(name, "GLIBC_2.2.5")
OLD_VERSION(dlmopen, "GLIBC_2.3.4")
OLD(dlclose) OLD(dlerror) OLD(dlopen) OLD(dlsym) OLD(dlvsym) OLD(pthread_condattr_setpshared) OLD(pthread_create)
OLD(pthread_detach) OLD(pthread_getspecific) OLD(pthread_join) OLD(pthread_key_create) OLD(pthread_key_delete)
OLD(pthread_kill) OLD(pthread_mutex_trylock) OLD(pthread_mutexattr_destroy) OLD(pthread_mutexattr_init)
OLD(pthread_mutexattr_setpshared) OLD(pthread_mutexattr_settype) OLD(pthread_once) OLD(pthread_rwlock_destroy)
OLD(pthread_rwlock_init) OLD(pthread_rwlock_rdlock) OLD(pthread_rwlock_timedrdlock) OLD(pthread_rwlock_timedwrlock)
OLD(pthread_rwlock_tryrdlock) OLD(pthread_rwlock_trywrlock) OLD(pthread_rwlock_unlock) OLD(pthread_rwlock_wrlock)
OLD(pthread_rwlockattr_destroy) OLD(pthread_rwlockattr_init) OLD(pthread_rwlockattr_setpshared)
OLD(pthread_setspecific) OLD(pthread_spin_destroy) OLD(pthread_spin_init) OLD(pthread_spin_lock)
OLD(pthread_spin_trylock) OLD(pthread_spin_unlock) OLD(sem_destroy) OLD(sem_init) OLD(sem_post) OLD(sem_timedwait)
OLD(sem_trywait) OLD(sem_wait) OLD(shm_open) OLD(shm_unlink)
// clang-format on
#endif
