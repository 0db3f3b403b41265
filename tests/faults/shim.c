/* System calls that fail, or fall short, on purpose: a library for LD_PRELOAD.
 *
 * It stands in for the functions of libc that touch files. Each call on a path, or on a descriptor, below one chosen folder has
 * a kind and is counted; all others pass, so the interpreter and its libraries are left alone. What is to fail is told by
 * tests/faults/shim.py, through ctypes:
 *
 *     faults_begin(root, kinds, first, last, seed, chance)    of the calls whose kind's bit is in `kinds`, counted from 1, those
 *                                                             from `first` to `last` fail, each with a probability of chance/2^32
 *     faults_choose(kind, errors, count)                      with which errors: errnos, or SHORT, or NOTHING
 *     faults_end()
 *
 * Which error it is, and whether it happens, follows from the seed and the number of the call. A call that fails does nothing,
 * but close, which closes, and a short transfer, which moves about half of the bytes. NOTHING is a read at the end of a file.
 */

#define _GNU_SOURCE
#include <dirent.h>
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <stdarg.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/statvfs.h>
#include <sys/syscall.h>
#include <sys/types.h>
#include <sys/uio.h>
#include <time.h>
#include <unistd.h>

/* In the order of KINDS in shim.py. */
enum kind {
  OPEN_READ, OPEN_WRITE, READ, WRITE, FSYNC, FSYNC_FOLDER, LINK, RENAME, UNLINK, MKDIR, RMDIR, TRUNCATE, ALLOCATE, LOCK, STAT,
  LIST, SPACE, CLOSE, MODE, TIMES, COPY, MAP, NUM_KINDS
};

enum { SHORT = -1, NOTHING = -2, MOST_ERRORS = 16, MOST_LOGGED = 4096, BLOCK = 4096 };

typedef struct { int kind, error; char function[16]; char path[236]; } fault;

static pthread_mutex_t mutex = PTHREAD_MUTEX_INITIALIZER;
static int is_on;
static char root[PATH_MAX];
static size_t root_length;
static uint64_t kinds, first_call, last_call, seed, chance, matched, counts[NUM_KINDS];
static int errors[NUM_KINDS][MOST_ERRORS], num_errors[NUM_KINDS];
static fault logged[MOST_LOGGED];
static int num_logged;

void faults_begin(const char *folder, uint64_t mask, uint64_t first, uint64_t last, uint64_t start, uint64_t probability) {
  pthread_mutex_lock(&mutex);
  snprintf(root, sizeof root, "%s", folder);
  root_length = strlen(root);
  kinds = mask, first_call = first, last_call = last, seed = start, chance = probability;
  matched = 0, num_logged = 0;
  memset(counts, 0, sizeof counts);
  __atomic_store_n(&is_on, 1, __ATOMIC_SEQ_CST);
  pthread_mutex_unlock(&mutex);
}

void faults_end(void) { __atomic_store_n(&is_on, 0, __ATOMIC_SEQ_CST); }

void faults_choose(int kind, const int *from, int count) {
  pthread_mutex_lock(&mutex);
  num_errors[kind] = count < MOST_ERRORS ? count : MOST_ERRORS;
  memcpy(errors[kind], from, num_errors[kind] * sizeof *from);
  pthread_mutex_unlock(&mutex);
}

uint64_t faults_count(int kind) { return counts[kind]; }
int faults_logged(void) { return num_logged; }
const fault *faults_log(int number) { return &logged[number]; }

static uint64_t mixed(uint64_t x) { /* splitmix64 */
  x += 0x9e3779b97f4a7c15u;
  x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9u;
  x = (x ^ (x >> 27)) * 0x94d049bb133111ebu;
  return x ^ (x >> 31);
}

static int is_below(const char *path) {
  return !strncmp(path, root, root_length) && (path[root_length] == '/' || !path[root_length]);
}

/* Return 0, an errno, SHORT or NOTHING. */
static int fault_of(enum kind kind, const char *function, const char *path) {
  int error = 0;
  pthread_mutex_lock(&mutex);
  if (is_on && is_below(path)) {
    counts[kind]++;
    if (kinds >> kind & 1 && num_errors[kind]) {
      uint64_t number = ++matched, random = mixed(seed ^ mixed(number));
      if (number >= first_call && number <= last_call && (random & 0xffffffff) < chance) {
        error = errors[kind][(random >> 32) % num_errors[kind]];
        if (num_logged < MOST_LOGGED) {
          fault *f = &logged[num_logged++];
          f->kind = kind, f->error = error;
          snprintf(f->function, sizeof f->function, "%s", function);
          snprintf(f->path, sizeof f->path, "%s", path + (path[root_length] ? root_length + 1 : root_length));
        }
      }
    }
  }
  pthread_mutex_unlock(&mutex);
  return error;
}

static int named(int fd, char *path) {
  char link[32];
  snprintf(link, sizeof link, "/proc/self/fd/%d", fd);
  long length = syscall(SYS_readlinkat, AT_FDCWD, link, path, PATH_MAX - 1);
  path[length > 0 ? length : 0] = 0;
  return length > 0;
}

static int fault_of_file(enum kind kind, const char *function, int fd) {
  char path[PATH_MAX];
  if (!__atomic_load_n(&is_on, __ATOMIC_SEQ_CST)) return 0;
  int before = errno, error = named(fd, path) ? fault_of(kind, function, path) : 0;
  errno = before;
  return error;
}

static int fault_of_path(enum kind kind, const char *function, int folder, const char *path) {
  char whole[2 * PATH_MAX];
  if (!__atomic_load_n(&is_on, __ATOMIC_SEQ_CST) || !path) return 0;
  if (path[0] == '/') return fault_of(kind, function, path);
  if (folder == AT_FDCWD || !named(folder, whole)) return 0; /* nothing below the root is named by a working folder */
  if (path[0]) snprintf(whole + strlen(whole), PATH_MAX, "/%s", path);
  return fault_of(kind, function, whole);
}

#define REAL(name) \
  static __typeof__(&name) real; \
  if (!real) real = (__typeof__(&name))dlsym(RTLD_NEXT, #name)
#define REFUSE(error, result) \
  do { int e_ = (error); if (e_ > 0) { errno = e_; return (result); } } while (0)

/* --- opening and closing */

#define OPENED_KIND(flags) ((flags) & (O_WRONLY | O_RDWR | O_CREAT | O_TRUNC) ? OPEN_WRITE : OPEN_READ)
#define MODE_OF(flags) \
  int mode = 0; \
  if ((flags) & (O_CREAT | __O_TMPFILE)) { va_list rest; va_start(rest, flags); mode = va_arg(rest, int); va_end(rest); }

#define OPEN(name) \
  int name(const char *path, int flags, ...) { \
    REAL(name); MODE_OF(flags) \
    REFUSE(fault_of_path(OPENED_KIND(flags), #name, AT_FDCWD, path), -1); \
    return real(path, flags, mode); \
  }
OPEN(open)
OPEN(open64)

#define OPENAT(name) \
  int name(int folder, const char *path, int flags, ...) { \
    REAL(name); MODE_OF(flags) \
    REFUSE(fault_of_path(OPENED_KIND(flags), #name, folder, path), -1); \
    return real(folder, path, flags, mode); \
  }
OPENAT(openat)
OPENAT(openat64)

int __openat_2(int folder, const char *path, int flags) { return openat(folder, path, flags); }

int creat(const char *path, mode_t mode) { return open(path, O_CREAT | O_WRONLY | O_TRUNC, mode); }

static int is_folder(int fd) {
  struct stat status;
  return !syscall(SYS_fstat, fd, &status) && S_ISDIR(status.st_mode);
}

int close(int fd) { /* no file system of Linux is asked where it is a folder */
  REAL(close);
  int is_on_now = __atomic_load_n(&is_on, __ATOMIC_SEQ_CST);
  int error = is_on_now && !is_folder(fd) ? fault_of_file(CLOSE, "close", fd) : 0, result = real(fd);
  REFUSE(error, -1);
  return result;
}

/* --- reading and writing */

/* Return how much is moved of `length` bytes; where O_DIRECT moves whole blocks, so does what falls short. */
static size_t shortened(int fd, size_t length) {
  size_t half = length > 1 ? length / 2 : length;
  if (fcntl(fd, F_GETFL) & O_DIRECT) half &= ~(size_t)(BLOCK - 1);
  return half ? half : length;
}

#define MOVE(name, kind, parameters, call) \
  ssize_t name parameters { \
    REAL(name); \
    int error = fault_of_file(kind, #name, fd); \
    REFUSE(error, -1); \
    if (error == NOTHING) return 0; \
    if (error == SHORT) length = shortened(fd, length); \
    return call; \
  }
MOVE(read, READ, (int fd, void *data, size_t length), real(fd, data, length))
MOVE(pread, READ, (int fd, void *data, size_t length, off_t at), real(fd, data, length, at))
MOVE(pread64, READ, (int fd, void *data, size_t length, off64_t at), real(fd, data, length, at))
MOVE(write, WRITE, (int fd, const void *data, size_t length), real(fd, data, length))
MOVE(pwrite, WRITE, (int fd, const void *data, size_t length, off_t at), real(fd, data, length, at))
MOVE(pwrite64, WRITE, (int fd, const void *data, size_t length, off64_t at), real(fd, data, length, at))
MOVE(sendfile, COPY, (int fd, int in, off_t *at, size_t length), real(fd, in, at, length))
MOVE(sendfile64, COPY, (int fd, int in, off64_t *at, size_t length), real(fd, in, at, length))
MOVE(copy_file_range, COPY, (int in, off64_t *from, int fd, off64_t *to, size_t length, unsigned flags),
     real(in, from, fd, to, length, flags))

/* Vectors: what falls short is a part of the first one that is not empty. */
static int first_part(int fd, const struct iovec *parts, int count, struct iovec *part) {
  while (count > 0 && !parts->iov_len) parts++, count--;
  if (count <= 0) return 0;
  part->iov_base = parts->iov_base;
  part->iov_len = shortened(fd, parts->iov_len);
  return 1;
}

#define MOVE_PARTS(name, kind, parameters, call) \
  ssize_t name parameters { \
    REAL(name); \
    struct iovec part; \
    int error = fault_of_file(kind, #name, fd); \
    REFUSE(error, -1); \
    if (error == NOTHING) return 0; \
    if (error == SHORT && first_part(fd, parts, count, &part)) parts = &part, count = 1; \
    return call; \
  }
#define PARTS int fd, const struct iovec *parts, int count
MOVE_PARTS(readv, READ, (PARTS), real(fd, parts, count))
MOVE_PARTS(preadv, READ, (PARTS, off_t at), real(fd, parts, count, at))
MOVE_PARTS(preadv64, READ, (PARTS, off64_t at), real(fd, parts, count, at))
MOVE_PARTS(preadv2, READ, (PARTS, off_t at, int flags), real(fd, parts, count, at, flags))
MOVE_PARTS(preadv64v2, READ, (PARTS, off64_t at, int flags), real(fd, parts, count, at, flags))
MOVE_PARTS(writev, WRITE, (PARTS), real(fd, parts, count))
MOVE_PARTS(pwritev, WRITE, (PARTS, off_t at), real(fd, parts, count, at))
MOVE_PARTS(pwritev64, WRITE, (PARTS, off64_t at), real(fd, parts, count, at))
MOVE_PARTS(pwritev2, WRITE, (PARTS, off_t at, int flags), real(fd, parts, count, at, flags))
MOVE_PARTS(pwritev64v2, WRITE, (PARTS, off64_t at, int flags), real(fd, parts, count, at, flags))

#define MAPPED(name, offset) \
  void *name(void *address, size_t length, int protection, int flags, int fd, offset at) { \
    REAL(name); \
    if (fd >= 0) REFUSE(fault_of_file(MAP, #name, fd), MAP_FAILED); \
    return real(address, length, protection, flags, fd, at); \
  }
MAPPED(mmap, off_t)
MAPPED(mmap64, off64_t)

/* --- one descriptor */

#define ON_FILE(type, name, kind, parameters, call) \
  type name parameters { REAL(name); REFUSE(fault_of_file(kind, #name, fd), -1); return call; }
ON_FILE(int, fsync, is_folder(fd) ? FSYNC_FOLDER : FSYNC, (int fd), real(fd))
ON_FILE(int, fdatasync, is_folder(fd) ? FSYNC_FOLDER : FSYNC, (int fd), real(fd))
ON_FILE(int, ftruncate, TRUNCATE, (int fd, off_t length), real(fd, length))
ON_FILE(int, ftruncate64, TRUNCATE, (int fd, off64_t length), real(fd, length))
ON_FILE(int, fallocate, ALLOCATE, (int fd, int mode, off_t at, off_t length), real(fd, mode, at, length))
ON_FILE(int, fallocate64, ALLOCATE, (int fd, int mode, off64_t at, off64_t length), real(fd, mode, at, length))
ON_FILE(int, flock, LOCK, (int fd, int operation), real(fd, operation))
ON_FILE(int, fchmod, MODE, (int fd, mode_t mode), real(fd, mode))
ON_FILE(int, futimens, TIMES, (int fd, const struct timespec times[2]), real(fd, times))
ON_FILE(int, fstat, STAT, (int fd, struct stat *status), real(fd, status))
ON_FILE(int, fstat64, STAT, (int fd, struct stat64 *status), real(fd, status))
ON_FILE(int, fstatvfs, SPACE, (int fd, struct statvfs *space), real(fd, space))
ON_FILE(int, fstatvfs64, SPACE, (int fd, struct statvfs64 *space), real(fd, space))

/* It returns the error, and leaves errno alone. */
#define ALLOCATED(name, offset) \
  int name(int fd, offset at, offset length) { \
    REAL(name); \
    int error = fault_of_file(ALLOCATE, #name, fd); \
    return error > 0 ? error : real(fd, at, length); \
  }
ALLOCATED(posix_fallocate, off_t)
ALLOCATED(posix_fallocate64, off64_t)

static int is_lock(int command) {
  return command == F_SETLK || command == F_SETLKW || command == F_OFD_SETLK || command == F_OFD_SETLKW;
}

#define CONTROL(name) \
  int name(int fd, int command, ...) { \
    REAL(name); \
    va_list rest; \
    va_start(rest, command); \
    void *argument = va_arg(rest, void *); \
    va_end(rest); \
    if (is_lock(command)) REFUSE(fault_of_file(LOCK, #name, fd), -1); \
    return real(fd, command, argument); \
  }
CONTROL(fcntl)
CONTROL(fcntl64)

/* --- names */

#define ON_PATH(type, name, kind, folder, parameters, call) \
  type name parameters { REAL(name); REFUSE(fault_of_path(kind, #name, folder, path), -1); return call; }
ON_PATH(int, link, LINK, AT_FDCWD, (const char *from, const char *path), real(from, path))
ON_PATH(int, linkat, LINK, folder, (int old, const char *from, int folder, const char *path, int flags),
        real(old, from, folder, path, flags))
ON_PATH(int, symlink, LINK, AT_FDCWD, (const char *to, const char *path), real(to, path))
ON_PATH(int, symlinkat, LINK, folder, (const char *to, int folder, const char *path), real(to, folder, path))
ON_PATH(int, rename, RENAME, AT_FDCWD, (const char *from, const char *path), real(from, path))
ON_PATH(int, renameat, RENAME, folder, (int old, const char *from, int folder, const char *path), real(old, from, folder, path))
ON_PATH(int, renameat2, RENAME, folder, (int old, const char *from, int folder, const char *path, unsigned flags),
        real(old, from, folder, path, flags))
ON_PATH(int, unlink, UNLINK, AT_FDCWD, (const char *path), real(path))
ON_PATH(int, unlinkat, flags & AT_REMOVEDIR ? RMDIR : UNLINK, folder, (int folder, const char *path, int flags),
        real(folder, path, flags))
ON_PATH(int, rmdir, RMDIR, AT_FDCWD, (const char *path), real(path))
ON_PATH(int, mkdir, MKDIR, AT_FDCWD, (const char *path, mode_t mode), real(path, mode))
ON_PATH(int, mkdirat, MKDIR, folder, (int folder, const char *path, mode_t mode), real(folder, path, mode))
ON_PATH(int, truncate, TRUNCATE, AT_FDCWD, (const char *path, off_t length), real(path, length))
ON_PATH(int, truncate64, TRUNCATE, AT_FDCWD, (const char *path, off64_t length), real(path, length))
ON_PATH(int, chmod, MODE, AT_FDCWD, (const char *path, mode_t mode), real(path, mode))
ON_PATH(int, fchmodat, MODE, folder, (int folder, const char *path, mode_t mode, int flags), real(folder, path, mode, flags))
ON_PATH(int, utimensat, TIMES, folder, (int folder, const char *path, const struct timespec times[2], int flags),
        real(folder, path, times, flags))
ON_PATH(int, access, STAT, AT_FDCWD, (const char *path, int mode), real(path, mode))
ON_PATH(int, faccessat, STAT, folder, (int folder, const char *path, int mode, int flags), real(folder, path, mode, flags))
ON_PATH(int, statvfs, SPACE, AT_FDCWD, (const char *path, struct statvfs *space), real(path, space))
ON_PATH(int, statvfs64, SPACE, AT_FDCWD, (const char *path, struct statvfs64 *space), real(path, space))
ON_PATH(int, stat, STAT, AT_FDCWD, (const char *path, struct stat *status), real(path, status))
ON_PATH(int, stat64, STAT, AT_FDCWD, (const char *path, struct stat64 *status), real(path, status))
ON_PATH(int, lstat, STAT, AT_FDCWD, (const char *path, struct stat *status), real(path, status))
ON_PATH(int, lstat64, STAT, AT_FDCWD, (const char *path, struct stat64 *status), real(path, status))
ON_PATH(int, fstatat, STAT, folder, (int folder, const char *path, struct stat *status, int flags),
        real(folder, path, status, flags))
ON_PATH(int, fstatat64, STAT, folder, (int folder, const char *path, struct stat64 *status, int flags),
        real(folder, path, status, flags))
ON_PATH(int, statx, STAT, folder, (int folder, const char *path, int flags, unsigned mask, struct statx *status),
        real(folder, path, flags, mask, status))

/* Of programs that were linked before glibc 2.33, as wheels are. */
int __xstat(int version, const char *path, struct stat *status);
int __lxstat(int version, const char *path, struct stat *status);
int __fxstat(int version, int fd, struct stat *status);
int __fxstatat(int version, int folder, const char *path, struct stat *status, int flags);
int __xstat64(int version, const char *path, struct stat64 *status);
int __lxstat64(int version, const char *path, struct stat64 *status);
int __fxstat64(int version, int fd, struct stat64 *status);
int __fxstatat64(int version, int folder, const char *path, struct stat64 *status, int flags);
ON_PATH(int, __xstat, STAT, AT_FDCWD, (int version, const char *path, struct stat *status), real(version, path, status))
ON_PATH(int, __lxstat, STAT, AT_FDCWD, (int version, const char *path, struct stat *status), real(version, path, status))
ON_FILE(int, __fxstat, STAT, (int version, int fd, struct stat *status), real(version, fd, status))
ON_PATH(int, __fxstatat, STAT, folder, (int version, int folder, const char *path, struct stat *status, int flags),
        real(version, folder, path, status, flags))
ON_PATH(int, __xstat64, STAT, AT_FDCWD, (int version, const char *path, struct stat64 *status), real(version, path, status))
ON_PATH(int, __lxstat64, STAT, AT_FDCWD, (int version, const char *path, struct stat64 *status), real(version, path, status))
ON_FILE(int, __fxstat64, STAT, (int version, int fd, struct stat64 *status), real(version, fd, status))
ON_PATH(int, __fxstatat64, STAT, folder, (int version, int folder, const char *path, struct stat64 *status, int flags),
        real(version, folder, path, status, flags))

/* --- listing */

DIR *opendir(const char *path) {
  REAL(opendir);
  REFUSE(fault_of_path(LIST, "opendir", AT_FDCWD, path), NULL);
  return real(path);
}

DIR *fdopendir(int fd) {
  REAL(fdopendir);
  REFUSE(fault_of_file(LIST, "fdopendir", fd), NULL);
  return real(fd);
}

#define LISTED(type, name) \
  type *name(DIR *folder) { REAL(name); REFUSE(fault_of_file(LIST, #name, dirfd(folder)), NULL); return real(folder); }
LISTED(struct dirent, readdir)
LISTED(struct dirent64, readdir64)
