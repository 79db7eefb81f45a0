/* Lets chosen calls of the C library fail below one directory: LD_PRELOADed into an unaware process.

   <FAILING_CALLS>/<call> holds "errno times delay_ms named": while the file is there, the call fails with that errno (0:
   it does not fail), `times` times (0: always), after a delay (-1: as long as the file is there: a device that hangs), on
   files whose path contains `named` (none: on every file). The test writes and removes these files while the process runs.
   FAILING_BELOW is the directory; what is not below it is never touched. */

#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <stdarg.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/uio.h>
#include <time.h>
#include <unistd.h>

enum call { PWRITE, FSYNC, OPEN, RENAME, LINK, FALLOCATE, PREAD, PREADV, CALLS };
static const char *const names[CALLS] = {"pwrite", "fsync", "open", "rename", "link", "fallocate", "pread", "preadv"};
static atomic_long hits[CALLS];
static _Atomic ino_t rule_of[CALLS];

static int below(const char *file) {
    const char *root = getenv("FAILING_BELOW");
    return root && file && strncmp(file, root, strlen(root)) == 0;
}

/* Returns 1 and sets errno if the call must fail on this file. */
static int fails(enum call call, const char *file) {
    const char *rules = getenv("FAILING_CALLS");
    char path[4096], named[256] = "";
    struct stat status;
    int number = 0, times = 0, delay_ms = 0;
    if (!rules || !below(file)) return 0;
    snprintf(path, sizeof path, "%s/%s", rules, names[call]);
    FILE *rule = fopen(path, "re");
    if (!rule) return 0;
    int fields = fscanf(rule, "%d %d %d %255s", &number, &times, &delay_ms, named);
    int known = fstat(fileno(rule), &status) == 0;
    fclose(rule);
    if (fields < 3 || !known || !strstr(file, named)) return 0;
    if (atomic_exchange(&rule_of[call], status.st_ino) != status.st_ino) hits[call] = 0;
    if (times && atomic_fetch_add(&hits[call], 1) >= times) return 0;
    while (delay_ms < 0 && access(path, F_OK) == 0) {
        struct timespec pause = {0, 10000000L};
        nanosleep(&pause, NULL);
    }
    if (delay_ms > 0) {
        struct timespec pause = {delay_ms / 1000, (long)(delay_ms % 1000) * 1000000L};
        nanosleep(&pause, NULL);
    }
    errno = number;
    return number != 0;
}

static int fd_fails(enum call call, int fd) {
    char link[64], file[4096];
    snprintf(link, sizeof link, "/proc/self/fd/%d", fd);
    ssize_t n = readlink(link, file, sizeof file - 1);
    if (n < 0) return 0;
    file[n] = 0;
    return fails(call, file);
}

#define NEXT(name) ((__typeof__(&name))dlsym(RTLD_NEXT, #name))

#define DEFINE_PWRITE(name, offset_type) \
    ssize_t name(int fd, const void *data, size_t count, offset_type offset) { \
        if (fd_fails(PWRITE, fd)) return -1; \
        return NEXT(name)(fd, data, count, offset); \
    }
DEFINE_PWRITE(pwrite, off_t)
DEFINE_PWRITE(pwrite64, off64_t)

#define DEFINE_PREAD(name, offset_type) \
    ssize_t name(int fd, void *data, size_t count, offset_type offset) { \
        if (fd_fails(PREAD, fd)) return -1; \
        return NEXT(name)(fd, data, count, offset); \
    }
DEFINE_PREAD(pread, off_t)
DEFINE_PREAD(pread64, off64_t)

#define DEFINE_PREADV(name, offset_type) \
    ssize_t name(int fd, const struct iovec *parts, int count, offset_type offset, int flags) { \
        if (fd_fails(PREADV, fd)) return -1; \
        return NEXT(name)(fd, parts, count, offset, flags); \
    }
DEFINE_PREADV(preadv2, off_t)
DEFINE_PREADV(preadv64v2, off64_t)

int fsync(int fd) {
    if (fd_fails(FSYNC, fd)) return -1;
    return NEXT(fsync)(fd);
}

#define DEFINE_OPEN(name) \
    int name(const char *path, int flags, ...) { \
        va_list rest; \
        va_start(rest, flags); \
        mode_t mode = flags & (O_CREAT | O_TMPFILE) ? va_arg(rest, mode_t) : 0; \
        va_end(rest); \
        if ((flags & O_ACCMODE) != O_RDONLY && fails(OPEN, path)) return -1; \
        return NEXT(name)(path, flags, mode); \
    }
DEFINE_OPEN(open)
DEFINE_OPEN(open64)

int rename(const char *from, const char *to) {
    if (fails(RENAME, to)) return -1;
    return NEXT(rename)(from, to);
}

/* For a name in an opened directory. */
static int fails_at(enum call call, int directory, const char *name) {
    char link[64], file[8192];
    if (*name == '/') return fails(call, name);
    snprintf(link, sizeof link, "/proc/self/fd/%d", directory);
    ssize_t n = readlink(link, file, 4096);
    if (n < 0) return 0;
    snprintf(file + n, sizeof file - n, "/%s", name);
    return fails(call, file);
}

int renameat(int from_directory, const char *from, int to_directory, const char *to) {
    if (fails_at(RENAME, to_directory, to)) return -1;
    return NEXT(renameat)(from_directory, from, to_directory, to);
}

int linkat(int from_directory, const char *from, int to_directory, const char *to, int flags) {
    if (fails_at(LINK, to_directory, to)) return -1;
    return NEXT(linkat)(from_directory, from, to_directory, to, flags);
}

int fallocate(int fd, int mode, off_t offset, off_t length) {
    if (fd_fails(FALLOCATE, fd)) return -1;
    return NEXT(fallocate)(fd, mode, offset, length);
}
