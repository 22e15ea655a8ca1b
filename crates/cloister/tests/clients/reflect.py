#!/usr/bin/env python3
"""A client that knows nothing about Cloister: it learns the API from the server's reflection and then uses it.

Usage: CLOISTER_TOKEN=... reflect.py HOST:PORT

Every message below is built from descriptors that the server described; no generated code of ours is here. Prints one
line of JSON with what it saw, for the test that starts it to judge.
"""

import json
import os
import struct
import sys
import urllib.request

import grpc
from google.protobuf import json_format
from google.protobuf.descriptor_pool import DescriptorPool
from google.protobuf.message import Message
from google.protobuf.message_factory import GetMessageClass
from grpc_reflection.v1alpha import reflection_pb2
from grpc_reflection.v1alpha.proto_reflection_descriptor_database import ProtoReflectionDescriptorDatabase

HOSTS = "cloister.app.v1.HostsService"
SESSIONS = "cloister.app.v1.SessionsService"
STREAMS = "cloister.app.v1.StreamsService"
DEADLINE_SECONDS = 60


class Client:
    """Calls methods by their reflected descriptors."""

    def __init__(self, channel: grpc.Channel, token: str) -> None:
        self.channel = channel
        self.metadata = (("authorization", f"Bearer {token}"),)
        self.database = ProtoReflectionDescriptorDatabase(channel)
        self.pool = DescriptorPool(self.database)

    def message(self, service: str, method: str, **fields: object) -> Message:
        """Returns a request of the method with these fields, as in JSON."""
        kind = GetMessageClass(self.pool.FindServiceByName(service).FindMethodByName(method).input_type)
        return json_format.ParseDict(fields, kind(), descriptor_pool=self.pool)

    def answer(self, service: str, method: str) -> type[Message]:
        return GetMessageClass(self.pool.FindServiceByName(service).FindMethodByName(method).output_type)

    def call(self, service: str, method: str, request: Message) -> Message:
        stub = self.channel.unary_unary(
            f"/{service}/{method}", type(request).SerializeToString, self.answer(service, method).FromString
        )
        return stub(request, metadata=self.metadata, timeout=DEADLINE_SECONDS)

    def watch(self, service: str, method: str, request: Message):
        stub = self.channel.unary_stream(
            f"/{service}/{method}", type(request).SerializeToString, self.answer(service, method).FromString
        )
        return stub(request, metadata=self.metadata, timeout=DEADLINE_SECONDS)

    def exchange(self, service: str, method: str, requests: list[Message]):
        stub = self.channel.stream_stream(
            f"/{service}/{method}", type(requests[0]).SerializeToString, self.answer(service, method).FromString
        )
        return stub(iter(requests), metadata=self.metadata, timeout=DEADLINE_SECONDS)


def services_of_v1(channel: grpc.Channel) -> list[str]:
    """Lists services by the newer reflection; its messages are those of v1alpha on the wire."""
    stub = channel.stream_stream(
        "/grpc.reflection.v1.ServerReflection/ServerReflectionInfo",
        reflection_pb2.ServerReflectionRequest.SerializeToString,
        reflection_pb2.ServerReflectionResponse.FromString,
    )
    request = reflection_pb2.ServerReflectionRequest(list_services="")
    (answer,) = stub(iter([request]), timeout=DEADLINE_SECONDS)
    return sorted(service.name for service in answer.list_services_response.service)


def post(url: str, kind: str, token: str, body: bytes) -> tuple[str, bytes]:
    headers = {"content-type": kind, "authorization": f"Bearer {token}"}
    with urllib.request.urlopen(urllib.request.Request(url, body, headers), timeout=DEADLINE_SECONDS) as answer:
        return answer.headers["content-type"], answer.read()


def grpc_web_frames(body: bytes) -> list[tuple[int, bytes]]:
    """Flags and content of each frame; the one with the top bit set holds the trailers."""
    frames = []
    while body:
        flags, length = struct.unpack(">BI", body[:5])
        assert len(body) >= 5 + length, "a frame is torn"
        frames.append((flags, body[5 : 5 + length]))
        body = body[5 + length :]
    return frames


def main() -> None:
    address, token = sys.argv[1], os.environ["CLOISTER_TOKEN"]
    seen: dict[str, object] = {}
    with grpc.insecure_channel(address) as channel:
        client = Client(channel, token)
        services = sorted(client.database.get_services())
        seen["services"] = services
        seen["services_v1"] = services_of_v1(channel)
        seen["methods"] = {
            service: sorted(method.name for method in client.pool.FindServiceByName(service).methods)
            for service in services
        }

        # One message over three protocols, all by the descriptor from above.
        request = client.message(HOSTS, "ListHosts")
        kind = client.answer(HOSTS, "ListHosts")
        url = f"http://{address}/{HOSTS}/ListHosts"
        over_grpc = client.call(HOSTS, "ListHosts", request)
        content, body = post(url, "application/json", token, json_format.MessageToJson(request).encode())
        # Strict: a field that the descriptor does not have is an error.
        over_connect = json_format.Parse(body, kind(), descriptor_pool=client.pool)
        web_content, body = post(
            url, "application/grpc-web+proto", token, struct.pack(">BI", 0, len(request.SerializeToString()))
        )
        (data, message), (end, trailers) = grpc_web_frames(body)
        assert (data, end) == (0, 0x80), "a grpc-web answer is one message and its trailers"
        over_web = kind.FromString(message)
        seen["contents"] = [content, web_content]
        seen["grpc_web_trailers"] = trailers.decode().strip()
        seen["hosts"] = {
            protocol: [
                {"id": host.id, "name": host.name, "connected": host.connected, "memory": host.capacity.memory_bytes}
                for host in answer.hosts
            ]
            for protocol, answer in [("grpc", over_grpc), ("connect", over_connect), ("grpc_web", over_web)]
        }

        # A refusal is a status, also for a client of another language.
        try:
            Client(channel, "nonsense").call(HOSTS, "ListHosts", request)
            seen["refused"] = "it was not"
        except grpc.RpcError as error:
            seen["refused"] = error.code().name

        # A session's whole life, with a stream from the server and one in both directions.
        create = client.message(SESSIONS, "CreateSession", requestId="reflect-create", name="reflected", waitMs="30000")
        session = client.call(SESSIONS, "CreateSession", create).session
        start = {"requestId": "reflect-exec", "session": session.id, "spec": {"argv": ["cat"], "stdin": True}}
        answers = client.exchange(
            STREAMS,
            "AttachExec",
            [
                client.message(STREAMS, "AttachExec", start=start),
                client.message(STREAMS, "AttachExec", stdin={"data": "aGVsbG8K", "eof": True}),
            ],
        )
        output, code = b"", None
        for answer in answers:
            if answer.WhichOneof("response") == "frame":
                frame = answer.frame
                output += frame.data.data if frame.WhichOneof("frame") == "data" else b""
                code = frame.exit.code if frame.WhichOneof("frame") == "exit" else code
        seen["exec"] = {"output": output.decode(), "code": code}
        client.call(
            SESSIONS, "DeleteSession", client.message(SESSIONS, "DeleteSession", requestId="d", session=session.id)
        )
        # Ends by itself after `deleted`.
        events = client.watch(STREAMS, "WatchSession", client.message(STREAMS, "WatchSession", session=session.id))
        seen["cursors"] = [answer.event.cursor for answer in events]
    print(json.dumps(seen))


if __name__ == "__main__":
    main()
