/* Preloaded into a process (LD_PRELOAD), this makes its wall clock jump, as an administrator or NTP would: by the seconds in
 * the file CLOCK_OFFSET_FILE (a long), at any time. Waits until a time of that clock end early or late, as real ones do:
 * they are cut into short ones. Other clocks are left alone. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <linux/futex.h>
#include <pthread.h>
#include <semaphore.h>
#include <stdarg.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <sys/time.h>
#include <time.h>
#include <unistd.h>

static volatile long *offset_s;
static const long slice_ns = 50000000;
#define REAL(name) ({ static void *found; if (!found) found = dlsym(RTLD_NEXT, #name); (__typeof__(&name))found; })

__attribute__((constructor)) static void start(void) {
  int fd = open(getenv("CLOCK_OFFSET_FILE"), O_RDONLY);
  void *at = fd < 0 ? MAP_FAILED : mmap(0, sizeof(long), PROT_READ, MAP_SHARED, fd, 0);
  if (at != MAP_FAILED) offset_s = at;
  if (fd >= 0) close(fd);
}
static long jumped(void) { return offset_s ? *offset_s : 0; }
static void now(struct timespec *t) { REAL(clock_gettime)(CLOCK_REALTIME, t); }
/* The end of a wait for `until` of the jumped clock, at most a slice away; whether that is `until` itself. */
static int next(const struct timespec *until, struct timespec *end) {
  struct timespec t; now(&t);
  long left = (until->tv_sec - jumped() - t.tv_sec) * 1000000000L + until->tv_nsec - t.tv_nsec;
  if (until->tv_sec - jumped() - t.tv_sec > 1) left = 2 * slice_ns;
  int last = left <= slice_ns;
  long n = t.tv_nsec + (last ? (left > 0 ? left : 0) : slice_ns);
  end->tv_sec = t.tv_sec + n / 1000000000L; end->tv_nsec = n % 1000000000L;
  return last;
}
int clock_gettime(clockid_t c, struct timespec *t) {
  int r = REAL(clock_gettime)(c, t);
  if (!r && (c == CLOCK_REALTIME || c == CLOCK_REALTIME_COARSE)) t->tv_sec += jumped();
  return r;
}
int gettimeofday(struct timeval *restrict t, void *restrict z) {
  struct timespec s; now(&s); t->tv_sec = s.tv_sec + jumped(); t->tv_usec = s.tv_nsec / 1000; return 0;
}
time_t time(time_t *out) { struct timespec s; now(&s); s.tv_sec += jumped(); if (out) *out = s.tv_sec; return s.tv_sec; }
int sem_timedwait(sem_t *restrict s, const struct timespec *restrict until) {
  for (;;) { struct timespec e; int last = next(until, &e), r = REAL(sem_timedwait)(s, &e);
    if (!r || errno != ETIMEDOUT || last) return r; }
}
static int timed(int (*real)(pthread_cond_t *, pthread_mutex_t *, const struct timespec *), pthread_cond_t *c, pthread_mutex_t *m, const struct timespec *until) {
  struct timespec t; clock_gettime(CLOCK_REALTIME, &t);
  struct timespec mono; REAL(clock_gettime)(CLOCK_MONOTONIC, &mono);
  if (labs(until->tv_sec - mono.tv_sec) < labs(until->tv_sec - t.tv_sec)) return real(c, m, until); /* of another clock */
  for (;;) { struct timespec e; int last = next(until, &e), r = real(c, m, &e);
    if (r != ETIMEDOUT || last) return r;
    if (r == ETIMEDOUT) return 0; /* a spurious wake-up */ }
}
int pthread_cond_timedwait(pthread_cond_t *restrict c, pthread_mutex_t *restrict m, const struct timespec *restrict u) {
  static void *f; if (!f) f = dlvsym(RTLD_NEXT, "pthread_cond_timedwait", "GLIBC_2.3.2");
  return timed((int (*)(pthread_cond_t *, pthread_mutex_t *, const struct timespec *))f, c, m, u);
}
long syscall(long number, ...) {
  va_list l; va_start(l, number); long a[6]; for (int i = 0; i < 6; i++) a[i] = va_arg(l, long); va_end(l);
  if (number == SYS_futex && (a[1] & FUTEX_CLOCK_REALTIME) && a[3])
    for (;;) { struct timespec e; int last = next((struct timespec *)a[3], &e);
      long r = REAL(syscall)(number, a[0], a[1], a[2], (long)&e, a[4], a[5]);
      if (!r || errno != ETIMEDOUT || last) return r; }
  if (number == SYS_clock_gettime && a[0] == CLOCK_REALTIME) return clock_gettime(a[0], (struct timespec *)a[1]);
  return REAL(syscall)(number, a[0], a[1], a[2], a[3], a[4], a[5]);
}
