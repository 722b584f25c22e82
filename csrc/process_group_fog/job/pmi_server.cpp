#include "job/pmi_server.hpp"

#include <sys/socket.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <map>
#include <sstream>
#include <utility>

#include <c10/util/Exception.h>
#include <c10/util/StringUtil.h>

namespace fog {
namespace {

// Parses "cmd=put kvsname=x key=a value=b c" into {cmd:put, kvsname:x, key:a, value:"b c"}. A value extends to the end
// of the line because MPICH's addresses are opaque text.
std::map<std::string, std::string> parse(const std::string& line) {
  std::map<std::string, std::string> fields;
  size_t at = 0;
  while (at < line.size()) {
    const auto equals = line.find('=', at);
    if (equals == std::string::npos) {
      break;
    }
    const auto name = line.substr(at, equals - at);
    auto end = name == "value" ? std::string::npos : line.find(' ', equals);
    if (end == std::string::npos) {
      end = line.size();
    }
    fields[name] = line.substr(equals + 1, end - equals - 1);
    at = end + 1;
  }
  return fields;
}

} // namespace

PmiServer::PmiServer(std::shared_ptr<Rendezvous> rendezvous, std::string job, std::string mapping)
    : rendezvous_(std::move(rendezvous)), job_(std::move(job)), mapping_(std::move(mapping)) {
  int ends[2];
  TORCH_CHECK(
      socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, ends) == 0, "fog: socketpair for the PMI server: ", std::strerror(errno));
  client_fd_ = ends[0];
  server_fd_ = ends[1];
  try {
    thread_ = std::thread([this] { serve_until_error(); });
  } catch (const std::exception& error) {
    close(server_fd_);
    close(client_fd_);
    C10_THROW_ERROR(DistBackendError, c10::str("fog: the system refuses a thread for the start of MPI: ", error.what()));
  }
}

PmiServer::~PmiServer() {
  shutdown(server_fd_, SHUT_RDWR);
  thread_.join();
  close(server_fd_);
  close(client_fd_);
}

std::string PmiServer::error() const {
  std::lock_guard<std::mutex> lock(mutex_);
  return error_;
}

void PmiServer::serve_until_error() {
  try {
    serve();
  } catch (const std::exception& error) {
    // MPI_Init gets no answer and keeps waiting, because MPICH would end the program after a failed answer. The thread
    // that started it sees error() and raises.
    std::lock_guard<std::mutex> lock(mutex_);
    error_ = "no memory"; // short enough to need no allocation
    if (dynamic_cast<const std::bad_alloc*>(&error) == nullptr) {
      error_ = error.what();
    }
  }
}

void PmiServer::serve() {
  std::string received;
  char chunk[4096];
  while (true) {
    const auto count = recv(server_fd_, chunk, sizeof(chunk), 0);
    if (count < 0 && errno == EINTR) {
      continue;
    }
    if (count <= 0) {
      return;
    }
    received.append(chunk, static_cast<size_t>(count));
    for (auto end = received.find('\n'); end != std::string::npos; end = received.find('\n')) {
      const auto line = received.substr(0, end);
      received.erase(0, end + 1);
      const auto reply = answer(line);
      for (size_t sent = 0; sent < reply.size();) {
        const auto written = send(server_fd_, reply.data() + sent, reply.size() - sent, MSG_NOSIGNAL);
        if (written < 0 && errno == EINTR) {
          continue;
        }
        if (written <= 0) {
          return;
        }
        sent += static_cast<size_t>(written);
      }
    }
  }
}

// A barrier of all ranks, in which each sends the values that it has put since the last one.
void PmiServer::exchange() {
  std::string mine;
  for (const auto& entry : std::exchange(put_, {})) {
    mine += entry + '\n';
  }
  for (const auto& theirs : rendezvous_->allgather("pmi-" + std::to_string(barriers_++), mine + '\n')) {
    std::istringstream lines(theirs);
    for (std::string line; std::getline(lines, line);) {
      if (const auto equals = line.find('='); equals != std::string::npos) {
        values_[line.substr(0, equals)] = line.substr(equals + 1);
      }
    }
  }
}

std::string PmiServer::answer(const std::string& line) {
  auto fields = parse(line);
  const auto& command = fields["cmd"];
  std::ostringstream reply;
  if (command == "init") {
    reply << "cmd=response_to_init pmi_version=1 pmi_subversion=1 rc=0";
  } else if (command == "get_maxes") {
    reply << "cmd=maxes kvsname_max=256 keylen_max=256 vallen_max=4096 rc=0";
  } else if (command == "get_appnum") {
    reply << "cmd=appnum appnum=0 rc=0";
  } else if (command == "get_my_kvsname") {
    reply << "cmd=my_kvsname kvsname=" << job_ << " rc=0";
  } else if (command == "get_universe_size") {
    reply << "cmd=universe_size size=" << rendezvous_->size() << " rc=0";
  } else if (command == "put") {
    put_.push_back(fields["key"] + '=' + fields["value"]);
    reply << "cmd=put_result rc=0 msg=success";
  } else if (command == "get") {
    // Ranks get a key only after the barrier that follows its put, so no rank has put a key that is missing now.
    const auto& key = fields["key"];
    if (key == "PMI_process_mapping") {
      reply << "cmd=get_result rc=0 msg=success value=" << mapping_;
    } else if (const auto found = values_.find(key); found != values_.end()) {
      reply << "cmd=get_result rc=0 msg=success value=" << found->second;
    } else {
      reply << "cmd=get_result rc=-1 msg=key_" << key << "_not_found value=unknown";
    }
  } else if (command == "barrier_in") {
    exchange();
    reply << "cmd=barrier_out rc=0 msg=success";
  } else if (command == "abort") {
    // MPI_Init has failed; the process does not wait for anything any more.
    throw std::runtime_error("MPI gave up: " + (fields["error_msg"].empty() ? "exit code " + fields["exitcode"] : fields["error_msg"]));
  } else if (command == "finalize") {
    reply << "cmd=finalize_ack rc=0 msg=success";
  } else {
    reply << "cmd=" << command << "_result rc=-1 msg=not_supported";
  }
  reply << '\n';
  return reply.str();
}

} // namespace fog
