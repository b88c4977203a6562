/* The loops of a data connection over the parts of one frame, in C: sends and receives them without Python's lock.

   At 1 Gbit/s a part of 64 KiB passes each half millisecond, in each direction, and Python took half of a pserver's
   processor time for them. `connection.py` does the same without this module. Frames, their order and all checks stay
   there: what is not the next part of the same frame goes back to it. Header and part are those of frames.py.

   Tested in tests/wire/test_connection.py, which runs each test with and without this module. */

#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include <errno.h>
#include <poll.h>
#include <stdint.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/uio.h>
#include <time.h>

enum { HEADER = 32, PART = HEADER + 12, SAME = 24 }; /* bytes; the first 24 name the frame, then comes `received` */
enum { BACK_S = 1 }; /* a slow frame lets Python note a sign of life so often */
enum { SMALL = 32 * 1024, TOGETHER = 128 * 1024 }; /* bytes: less is waited for by packets, more wakes several times */

static const uint32_t MORE = 1u << 31; /* in the bytes of a part: the next one is sent together with it */

typedef struct {
    uint32_t total, offset, nbytes;
    int more;
} Part;

static uint32_t get_u32(const unsigned char *from)
{
    return from[0] | (uint32_t)from[1] << 8 | (uint32_t)from[2] << 16 | (uint32_t)from[3] << 24;
}

static void put_u32(unsigned char *to, uint32_t value)
{
    for (int byte = 0; byte < 4; byte++)
        to[byte] = (unsigned char)(value >> 8 * byte);
}

static Part part_of(const unsigned char *head)
{
    uint32_t nbytes = get_u32(head + HEADER + 8);
    return (Part){get_u32(head + HEADER), get_u32(head + HEADER + 4), nbytes & ~MORE, (nbytes & MORE) != 0};
}

static int64_t now_s(void)
{
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return now.tv_sec;
}

/* Leaves in `pieces` what is left after `done` bytes; returns the number of pieces. */
static int left_of(struct iovec *pieces, int count, size_t done)
{
    int first = 0;
    while (first < count && done >= pieces[first].iov_len)
        done -= pieces[first++].iov_len;
    for (int piece = first; piece < count; piece++)
        pieces[piece - first] = pieces[piece];
    if (first < count) {
        pieces[0].iov_base = (char *)pieces[0].iov_base + done;
        pieces[0].iov_len -= done;
    }
    return count - first;
}

/* How many of the `left` bytes of a part wake their reader at once: all, or as many as `TOGETHER` and half the receive
   buffer. For more Linux enlarges the buffer, the other end sends further ahead, and an urgent slice waits behind that. */
static int wake_for(int fd, size_t left)
{
    int buffer = 0;
    socklen_t size = sizeof buffer;
    if (left < SMALL || getsockopt(fd, SOL_SOCKET, SO_RCVBUF, &buffer, &size) < 0 || buffer < 2 * SMALL)
        return 1;
    size_t most = buffer / 2 < TOGETHER ? buffer / 2 : TOGETHER;
    return (int)(left <= most ? left : left < 2 * most ? left / 2 : most);
}

/* Has `fd` count as readable, and its reader woken, once `nbytes` are there; `now` is what was set before. */
static void set_least(int fd, int *now, int nbytes)
{
    if (nbytes != *now)
        setsockopt(fd, SOL_SOCKET, SO_RCVLOWAT, &nbytes, sizeof nbytes);
    *now = nbytes;
}

/* Receives all of `pieces`; 0 if the connection ends before, else -1 with errno. `so_far` counts.

   `least` is never more than what is left, so nothing waits for bytes that may not come. */
static int receive_all(int fd, struct iovec *pieces, int count, int *least, size_t *so_far)
{
    *so_far = 0;
    count = left_of(pieces, count, 0); /* an empty piece would look like the end */
    while (count) {
        struct msghdr message = {.msg_iov = pieces, .msg_iovlen = count};
        struct pollfd ask = {.fd = fd, .events = POLLIN};
        size_t left = pieces[0].iov_len + (count > 1 ? pieces[1].iov_len : 0);
        set_least(fd, least, wake_for(fd, left));
        int together = *least > 1;
        if (together && poll(&ask, 1, -1) < 0 && errno != EINTR)
            return -1;
        ssize_t got = recvmsg(fd, &message, together ? MSG_DONTWAIT : MSG_WAITALL);
        if (got < 0 && (errno == EINTR || errno == EAGAIN || errno == EWOULDBLOCK))
            continue;
        if (got <= 0)
            return (int)got;
        *so_far += (size_t)got;
        count = left_of(pieces, count, (size_t)got);
    }
    return 1;
}

PyDoc_STRVAR(receive_doc, "receive(fd, head, payload) -> (bytes of the payload that are there, whether `head` is the next)\n\n"
    "Receives the part that `head` begins into `payload`, the memory of its whole frame, and the parts of the frame\n"
    "that follow it at once. `head` is then that of the next part, unless the frame has ended and nothing was sent\n"
    "together with it. Returns each second at the latest if parts come. OSError: the connection broke or ended.");

static PyObject *receive(PyObject *module, PyObject *arguments)
{
    int fd, got = 1, known = 0, least = 1;
    Py_buffer head, payload;
    size_t so_far = 0, wanted = 0, there = 0;
    (void)module;
    if (!PyArg_ParseTuple(arguments, "iw*w*", &fd, &head, &payload))
        return NULL;
    unsigned char *bytes = head.buf, name[SAME];
    Part part = {0};
    if (head.len != PART || (part = part_of(bytes), part.total != (size_t)payload.len)
            || (uint64_t)part.offset + part.nbytes > part.total) {
        PyErr_Format(PyExc_ValueError, "a part must lie within its frame, got one of %u bytes at %u of %zd",
                     (unsigned)part.nbytes, (unsigned)part.offset, payload.len);
        goto failed;
    }
    Py_BEGIN_ALLOW_THREADS
    int64_t began_s = now_s();
    memcpy(name, bytes, SAME);
    for (;;) {
        there = (size_t)part.offset + part.nbytes;
        /* Within a frame there is always another part: to wait for its header delays nothing. */
        known = part.more || there < part.total;
        struct iovec pieces[2] = {{(char *)payload.buf + part.offset, part.nbytes}, {bytes, PART}};
        wanted = part.nbytes + (known ? PART : 0);
        if ((got = receive_all(fd, pieces, known ? 2 : 1, &least, &so_far)) <= 0 || there == part.total)
            break;
        Part next = part_of(bytes);
        if (memcmp(name, bytes, SAME) || next.total != part.total || next.offset != there || !next.nbytes
                || next.nbytes > next.total - next.offset || now_s() > began_s + BACK_S)
            break;
        part = next;
    }
    int error = errno;
    set_least(fd, &least, 1);
    errno = error;
    Py_END_ALLOW_THREADS
    if (got < 0)
        PyErr_SetFromErrno(PyExc_OSError);
    else if (!got)
        PyErr_Format(PyExc_OSError, "the connection ended within a frame, after %zu of %zu bytes", so_far, wanted);
failed:
    PyBuffer_Release(&head);
    PyBuffer_Release(&payload);
    return PyErr_Occurred() ? NULL : Py_BuildValue("nO", (Py_ssize_t)there, known ? Py_True : Py_False);
}

/* Waits until `fd` can be written to; whether it had to wait, or -1 with errno. */
static int writable(int fd)
{
    struct pollfd ask = {.fd = fd, .events = POLLOUT};
    int ready = poll(&ask, 1, 0);
    if (ready)
        return ready < 0 && errno != EINTR ? -1 : 0;
    while ((ready = poll(&ask, 1, -1)) < 0 && errno == EINTR)
        ;
    return ready < 0 ? -1 : 1;
}

PyDoc_STRVAR(send_doc, "send(fd, head, payload, part_bytes, overtaken) -> (bytes sent, waits)\n\n"
    "Sends `payload`, whose place in its frame `head` says, in parts with such headers, one after the other as the\n"
    "socket takes them; ends early before a part once byte 0 of `overtaken` is set, which any thread may do. `waits`:\n"
    "how often the socket was full. OSError: the connection broke.");

static PyObject *send_parts(PyObject *module, PyObject *arguments)
{
    int fd, waited = 0;
    Py_buffer head, payload, overtaken;
    Py_ssize_t done = 0, part_bytes, waits = 0;
    (void)module;
    if (!PyArg_ParseTuple(arguments, "iy*y*ny*", &fd, &head, &payload, &part_bytes, &overtaken))
        return NULL;
    Part run = {0};
    if (head.len != PART || (run = part_of(head.buf), run.total < (uint64_t)run.offset + (uint64_t)payload.len)
            || part_bytes < 1 || overtaken.len != 1) {
        PyErr_Format(PyExc_ValueError, "parts must lie within their frame of %u bytes, got %zd bytes at %u by %zd",
                     (unsigned)run.total, payload.len, (unsigned)run.offset, part_bytes);
        goto failed;
    }
    Py_BEGIN_ALLOW_THREADS
    volatile const unsigned char *stop = overtaken.buf;
    unsigned char bytes[PART];
    memcpy(bytes, head.buf, PART);
    while (done < payload.len) {
        if ((waited = writable(fd)) < 0 || *stop)
            break;
        waits += waited;
        Py_ssize_t nbytes = payload.len - done < part_bytes ? payload.len - done : part_bytes;
        put_u32(bytes + HEADER + 4, run.offset + (uint32_t)done);
        put_u32(bytes + HEADER + 8, (uint32_t)nbytes);
        struct iovec pieces[2] = {{bytes, PART}, {(char *)payload.buf + done, (size_t)nbytes}};
        for (int count = 2; count;) {
            struct msghdr message = {.msg_iov = pieces, .msg_iovlen = count};
            ssize_t sent = sendmsg(fd, &message, MSG_DONTWAIT | MSG_NOSIGNAL);
            if (sent >= 0) {
                count = left_of(pieces, count, (size_t)sent);
            } else if (errno == EAGAIN || errno == EWOULDBLOCK) {
                waits++;
                if (writable(fd) < 0) {
                    waited = -1;
                    break;
                }
            } else if (errno != EINTR) {
                waited = -1;
                break;
            }
        }
        if (waited < 0)
            break;
        done += nbytes;
    }
    Py_END_ALLOW_THREADS
    if (waited < 0)
        PyErr_SetFromErrno(PyExc_OSError);
failed:
    PyBuffer_Release(&head);
    PyBuffer_Release(&payload);
    PyBuffer_Release(&overtaken);
    return PyErr_Occurred() ? NULL : Py_BuildValue("nn", done, waits);
}

static PyMethodDef methods[] = {
    {"receive", receive, METH_VARARGS, receive_doc},
    {"send", send_parts, METH_VARARGS, send_doc},
    {NULL, NULL, 0, NULL},
};

static struct PyModuleDef module = {
    PyModuleDef_HEAD_INIT, "_native", "Loops over the parts of one frame; see _native.c.", 0, methods, NULL, NULL, NULL, NULL,
};

PyMODINIT_FUNC PyInit__native(void)
{
    return PyModule_Create(&module);
}
