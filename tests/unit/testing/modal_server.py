"""A server in this process that speaks as much of Modal's protocol as one run needs, and runs what it is sent.

It builds no image and mounts nothing: what is shown is that our side of the protocol is right.
"""

import asyncio
import pickle
import threading
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from typing import Any


class _Calls:
    """Answers to the calls of one app with one generator function."""

    def __init__(self, restarts: bool) -> None:
        from modal_proto import api_pb2

        self.api = api_pb2
        self.restarts = restarts
        self.said: list[str] = []
        self.function: Any = None
        self.inputs: list[Any] = []
        self.num_yielded, self.is_told = 0, False
        self.is_done = threading.Event()

    def answer(self, name: str, request: Any) -> Any:
        """The response to a call that is not a stream; None where the protocol wants an empty one."""
        api = self.api
        success = api.GenericResult(status=api.GenericResult.GENERIC_STATUS_SUCCESS)
        match name:
            case "AppCreate":
                return api.AppCreateResponse(app_id="ap-1", app_page_url="http://here")
            case "EnvironmentGetOrCreate":
                return api.EnvironmentGetOrCreateResponse(
                    environment_id="en-1",
                    metadata=api.EnvironmentMetadata(
                        name="main", settings=api.EnvironmentSettings(image_builder_version="2025.06")
                    ),
                )
            case "ImageGetOrCreate":
                return api.ImageGetOrCreateResponse(image_id="im-1", result=success, metadata=api.ImageMetadata())
            case "MountBatchedCheckExistence":
                return api.MountBatchedCheckExistenceResponse()  # none is missing
            case "MountGetOrCreate":
                return api.MountGetOrCreateResponse(mount_id="mo-1")
            case "VolumeGetOrCreate":
                return api.VolumeGetOrCreateResponse(volume_id=f"vo-{request.deployment_name}")
            case "FunctionPrecreate":
                return api.FunctionPrecreateResponse(function_id="fu-1")
            case "FunctionCreate":
                self.function = request
                return api.FunctionCreateResponse(
                    function_id="fu-1",
                    function_data=api.FunctionData(
                        ranked_functions=[api.FunctionData.RankedFunction(rank=0, function=request.function)]
                    ),
                    handle_metadata=api.FunctionHandleMetadata(
                        function_name=request.function.function_name, function_type=request.function.function_type
                    ),
                )
            case "AppPublish":
                return api.AppPublishResponse()
            case "FunctionMap":
                self.inputs = [item.input for item in request.pipelined_inputs]
                self.num_yielded, self.is_told = 0, False
                self.is_done.clear()
                answers = [
                    api.FunctionPutInputsResponseItem(idx=item.idx, input_id=f"in-{item.idx}")
                    for item in request.pipelined_inputs
                ]
                return api.FunctionMapResponse(
                    function_call_id="fc-1", function_call_jwt="jwt", pipelined_inputs=answers
                )
            case "FunctionGetOutputs":
                if not self.is_done.is_set():
                    return api.FunctionGetOutputsResponse(last_entry_id="1-0")
                done = api.GeneratorDone(items_total=self.num_yielded)
                item = api.FunctionGetOutputsItem(
                    result=api.GenericResult(status=success.status, data=done.SerializeToString()),
                    idx=0,
                    input_id="in-0",
                    data_format=api.DATA_FORMAT_GENERATOR_DONE,
                )
                return api.FunctionGetOutputsResponse(outputs=[item], idxs=[0], last_entry_id="2-0")
            case _:
                return None

    async def chunks(self) -> AsyncIterator[Any]:
        """What the function yields. Where it restarts, the first half of a run comes before the whole of another."""
        if self.is_told:  # the client asks until it has heard of the end otherwise
            await asyncio.sleep(0.05)
            return
        self.is_told = True
        function = pickle.loads(self.function.function.function_serialized)
        arguments, keywords = pickle.loads(self.inputs[0].args)
        values = list(function(*arguments, **keywords))
        if self.restarts:
            values = [*values[: len(values) // 2], *function(*arguments, **keywords)]
        for value in values:
            self.num_yielded += 1
            yield self.api.DataChunk(
                data_format=self.api.DATA_FORMAT_PICKLE, data=pickle.dumps(value), index=self.num_yielded
            )
        self.is_done.set()


def _servicer(calls: _Calls) -> Any:
    from google.protobuf import empty_pb2
    from modal_proto import api_grpc

    def handler(name: str) -> Any:
        async def handle(_: Any, stream: Any) -> None:
            request = await stream.recv_message()
            calls.said.append(name)
            if name == "FunctionCallGetDataOut":
                async for chunk in calls.chunks():
                    await stream.send_message(chunk)
                return
            if name == "FunctionGetOutputs" and not calls.is_done.is_set():
                await asyncio.sleep(0.05)
            response = calls.answer(name, request)
            await stream.send_message(empty_pb2.Empty() if response is None else response)

        return handle

    names = api_grpc.ModalClientBase.__abstractmethods__
    return type("Servicer", (api_grpc.ModalClientBase,), {name: handler(name) for name in names})()


@contextmanager
def modal_server(*, restarts: bool = False) -> Iterator[tuple[str, _Calls]]:
    """Its address, and what was said to it. restarts: the machine is taken away once, in the middle."""
    from grpclib.server import Server

    calls = _Calls(restarts)
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever, daemon=True)
    thread.start()

    async def start() -> Any:
        server = Server([_servicer(calls)])
        await server.start("127.0.0.1", 0)
        return server

    server = asyncio.run_coroutine_threadsafe(start(), loop).result(60)
    try:
        yield f"http://127.0.0.1:{server._server.sockets[0].getsockname()[1]}", calls
    finally:

        async def stop() -> None:
            server.close()
            await server.wait_closed()

        asyncio.run_coroutine_threadsafe(stop(), loop).result(60)
        loop.call_soon_threadsafe(loop.stop)
        thread.join(60)
        loop.close()
